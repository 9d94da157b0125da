# SPDX-License-Identifier: Apache-2.0
"""One process of vLLM-Omni around its own Wan transformer on a CPU.

    python omni_worker.py RANK RANKS PORT FILE

FILE holds the configuration and weights of a diffusers model and what to run; each process writes FILE.RANK.
"""

import importlib.util
import sys
import types

import torch
import vllm_omni.platforms as platforms
from vllm.config import VllmConfig, set_current_vllm_config
from vllm_omni.platforms.interface import OmniPlatformEnum, UnspecifiedOmniPlatform


class Cpu(UnspecifiedOmniPlatform):
    """A platform of plain PyTorch. vLLM-Omni has none for a CPU; what it does on ROCm without kernels runs there."""

    _omni_enum = OmniPlatformEnum.ROCM

    @classmethod
    def get_device_count(cls):
        return 1

    @classmethod
    def set_device(cls, device):
        pass

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

        return DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()


def main(rank, ranks, port, path):
    """Load the model into vLLM-Omni, run it, and write the outputs, with what the layers counted."""
    platforms._current_omni_platform = Cpu()
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.diffusion.distributed.sp_plan import SequenceParallelConfig, get_sp_plan_from_model
    from vllm_omni.diffusion.forward_context import get_forward_context, set_forward_context
    from vllm_omni.diffusion.hooks.sequence_parallel import apply_sequence_parallel
    from vllm_omni.diffusion.layers import norm
    from vllm_omni.plugins import load_omni_general_plugins

    name = "vllm_omni.diffusion.models.wan2_2"  # whose pipelines need more packages than its transformer
    package = types.ModuleType(name)
    package.__path__ = [
        importlib.util.find_spec("vllm_omni").submodule_search_locations[0] + "/diffusion/models/wan2_2"
    ]
    sys.modules[name] = package
    from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel

    # Its kernel for a CPU takes queries, which are a part of wider rows, for rows of their own.
    norm.RMSNorm.forward_hip = norm.RMSNorm.forward_native
    load_omni_general_plugins()
    import dynaxx.video.vllm_omni as ours

    calls, attend = [], ours.Layer.attend

    def recorded(layer, q, k, v, metadata):
        out = attend(layer, q, k, v, metadata)
        calls.append((layer.index, q, k, v, out))
        return out

    ours.Layer.attend = recorded
    given = torch.load(path)
    settings = VllmConfig()
    split = DiffusionParallelConfig(**{given["split"]: ranks}) if ranks > 1 else DiffusionParallelConfig()
    own = OmniDiffusionConfig(model="wan", parallel_config=split)
    with set_current_vllm_config(settings), set_current_diffusion_config(own):
        parallel_state.init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        parallel_state.initialize_model_parallel(
            sequence_parallel_size=split.sequence_parallel_size,
            ulysses_degree=split.ulysses_degree,
            tensor_parallel_size=split.tensor_parallel_size,
            backend="gloo",
        )
        with set_forward_context(vllm_config=settings, omni_diffusion_config=own):
            model = WanTransformer3DModel(**given["config"])
        model.load_weights(given["weights"].items())
        for module in model.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
        if split.sequence_parallel_size > 1:
            plan = get_sp_plan_from_model(model)
            apply_sequence_parallel(model, SequenceParallelConfig(ulysses_degree=split.ulysses_degree), plan)
        outputs = []
        for step in given["steps"]:
            context = set_forward_context(vllm_config=settings, omni_diffusion_config=own, denoise_step_idx=step)
            with torch.no_grad(), context:
                get_forward_context().sp_plan_hooks_applied = split.sequence_parallel_size > 1
                outputs.append(model(*given["inputs"], return_dict=False)[0])
    torch.save({"outputs": outputs, "counts": dict(ours.counts), "calls": calls}, f"{path}.{rank}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
