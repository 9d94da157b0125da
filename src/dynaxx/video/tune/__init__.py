# SPDX-License-Identifier: Apache-2.0
"""Find the sparsest policy that keeps what a diffusion pipeline makes.

The files:

    sampling  pipelines that make latents and frames, and how two of them differ
    costs     what each density costs each head in each part of the denoising
    search    the policy for a density, and the sparsest one within a limit
    run       the command: search, validate, write the files
"""
