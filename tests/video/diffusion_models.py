# SPDX-License-Identifier: Apache-2.0
"""Small random transformers of each family of diffusers, with inputs for them."""

import torch


def wan(diffusers, generator, shape=(3, 6, 10), batch=2, text=7):
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32)  # fmt: skip
    frames, height, width = shape
    return model, {
        "hidden_states": torch.randn(batch, 4, frames, height, width, generator=generator),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
    }


def hunyuan(diffusers, generator, shape=(3, 6, 10), batch=2, text=7):
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4))  # fmt: skip
    mask = torch.ones(batch, text)
    mask[-1, text - 3 :] = 0
    return model, {
        "hidden_states": torch.randn(batch, 4, *shape, generator=generator),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(batch, 8, generator=generator),
        "guidance": torch.full((batch,), 6000.0),
    }


def hunyuan15(diffusers, generator, shape=(3, 5, 6), batch=2, text=7):
    model = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=2,
        num_refiner_layers=1, text_embed_dim=16, text_embed_2_dim=8, image_embed_dim=8,
        rope_axes_dim=(2, 4, 4))  # fmt: skip
    mask = torch.ones(batch, text)
    mask[-1, text - 3 :] = 0
    return model, {
        "hidden_states": torch.randn(batch, 4, *shape, generator=generator),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": torch.randn(batch, 4, 8, generator=generator),
        "encoder_attention_mask_2": torch.ones(batch, 4),
        "image_embeds": torch.zeros(batch, 3, 8),
    }


def ltx(diffusers, generator, shape=(3, 5, 7), batch=2, text=7):
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=16)  # fmt: skip
    frames, height, width = shape
    return model, {
        "hidden_states": torch.randn(batch, frames * height * width, 8, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "timestep": torch.full((batch,), 500),
        "encoder_attention_mask": torch.ones(batch, text, dtype=torch.bool),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def cogvideox(diffusers, generator, shape=(3, 6, 10), batch=2, text=7):
    frames, height, width = shape
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=2, sample_width=width, sample_height=height, sample_frames=9, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=text)  # fmt: skip
    return model, {
        "hidden_states": torch.randn(batch, frames, 4, height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "timestep": torch.full((batch,), 500),
    }


def mochi(diffusers, generator, shape=(3, 6, 10), batch=2, text=7):
    model = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=12, num_layers=2, pooled_projection_dim=8,
        in_channels=4, text_embed_dim=16, time_embed_dim=16, max_sequence_length=text)  # fmt: skip
    mask = torch.ones(batch, text, dtype=torch.bool)
    mask[-1, text - 3 :] = False
    return model, {
        "hidden_states": torch.randn(batch, 4, *shape, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "timestep": torch.full((batch,), 500),
        "encoder_attention_mask": mask,
    }


def flux(diffusers, generator, shape=(1, 9, 11), batch=2, text=7):
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=8, axes_dims_rope=(4, 6, 6))  # fmt: skip
    _, height, width = shape
    at = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1).float()
    return model, {
        "hidden_states": torch.randn(batch, height * width, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "pooled_projections": torch.randn(batch, 8, generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": at.view(-1, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def qwen(diffusers, generator, shape=(1, 9, 11), batch=2, text=7):
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6))  # fmt: skip
    mask = torch.ones(batch, text, dtype=torch.bool)
    mask[-1, text - 3 :] = False
    return model, {
        "hidden_states": torch.randn(batch, shape[1] * shape[2], 16, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[shape]] * batch,
    }


def ltx2(diffusers, generator, shape=(3, 5, 7), batch=2, text=7):
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=8,
        audio_cross_attention_dim=16, num_layers=2, caption_channels=16)  # fmt: skip
    frames, height, width = shape
    return model, {
        "hidden_states": torch.randn(batch, frames * height * width, 8, generator=generator),
        "audio_hidden_states": torch.randn(batch, 5, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "audio_encoder_hidden_states": torch.randn(batch, text, 16, generator=generator),
        "timestep": torch.full((batch,), 500),
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": 5,
    }


FAMILIES = {each.__name__: each for each in (wan, hunyuan, hunyuan15, ltx, ltx2, cogvideox, mochi, flux, qwen)}


def random_model(diffusers, name, seed=0, **options):
    """Return a random model in eval mode and the arguments of its forward."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, arguments = FAMILIES[name](diffusers, generator, **options)
    with torch.no_grad():  # some families start with zeros at the end, or with equal tokens
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim > 1 else 0.1))
    return model.eval(), arguments


def run(model, arguments):
    """Return the first output of a forward pass."""
    return model(**arguments, return_dict=False)[0]
