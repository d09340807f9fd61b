"""The families of timm: a small member or two of each, at a small size of the images where it takes one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.architectures.architecture import (
    Architecture,
    Example,
    NotMade,
    images,
)
from onebasin.cli.torchvision_operators import declare_missing_operators

_NAMES = (
    "bat_resnext26ts", "beit_base_patch16_224", "beitv2_base_patch16_224", "botnet26t_256", "caformer_s18",
    "cait_xxs24_224", "coat_lite_tiny", "coat_tiny", "coatnet_0_rw_224", "convformer_s18", "convit_tiny",
    "convmixer_768_32", "convnext_atto", "convnextv2_atto", "cpubone_b0_bfrobust", "crossvit_9_240", "cs3darknet_s",
    "csatv2", "cspdarknet53", "cspresnet50", "davit_tiny", "deit3_small_patch16_224", "deit_tiny_distilled_patch16_224",
    "densenet121", "dla34", "dm_nfnet_f0", "dpn68", "eca_nfnet_l0", "eca_vovnet39b", "ecaresnet26t",
    "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0", "efficientnet_b0", "efficientvim_m1",
    "efficientvit_b0", "efficientvit_m0", "ese_vovnet19b_dw", "eva02_tiny_patch14_224", "fasternet_t0", "fastvit_t8",
    "fbnetv3_b", "focalnet_tiny_srf", "gcresnet33ts", "gcvit_xxtiny", "gernet_s", "ghostnet_100", "ghostnetv2_100",
    "gmixer_12_224", "gmlp_s16_224", "halonet26t", "hardcorenas_a", "hgnetv2_b0", "hiera_tiny_224", "hrnet_w18_small",
    "iformer_t", "inception_next_atto", "inception_resnet_v2", "inception_v3", "inception_v4", "lambda_resnet26t",
    "lcnet_050", "lcnetv2_small", "legacy_seresnet18", "legacy_xception", "levit_128s", "levit_conv_128s",
    "lowformer_b0", "mambaout_femto", "maxxvit_rmlp_nano_rw_256", "mixer_s16_224", "mixnet_s", "mnasnet_small",
    "mobilenetv1_100", "mobilenetv3_small_050", "mobilenetv4_conv_small", "mobilenetv4_hybrid_medium", "mobileone_s0",
    "mobilevit_xxs", "mobilevitv2_050", "mvitv2_tiny", "naflexvit_base_patch16_gap", "nest_tiny", "nextvit_small",
    "nf_resnet26", "pit_ti_224", "poolformer_s12", "poolformerv2_s12", "pvt_v2_b0", "qwen3_vit_88m", "rdnet_tiny",
    "regnetx_002", "regnety_002", "regnetz_b16", "repghostnet_050", "repvgg_a0", "repvit_m1", "res2net50_26w_4s",
    "resmlp_12_224", "resnest14d", "resnet26d", "resnetaa34d", "resnetblur50", "resnetv2_18", "resnetv2_50",
    "resnext50_32x4d", "rexnet_100", "sam2_hiera_tiny", "samvit_base_patch16_224", "seresnet33ts", "selecsls42b",
    "semnasnet_075", "sequencer2d_s", "shvit_s1", "skresnet18", "spnasnet_100", "starnet_s1", "swiftformer_xs",
    "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_ns_224", "swinv2_tiny_window8_256", "tf_efficientnet_lite0",
    "tiny_vit_5m_224", "tinynet_e", "tnt_s_patch16_224", "tresnet_m", "twins_pcpvt_small", "twins_svt_small",
    "vgg11_bn", "visformer_tiny", "vit_base_patch16_siglip_224", "vit_betwixt_patch16_reg1_gap_256",
    "vit_relpos_small_patch16_224", "vit_small_patch14_dinov2", "vit_srelpos_small_patch16_224", "vit_tiny_patch16_224",
    "vit_tiny_r_s16_p8_224", "vitamin_small_224", "volo_d1_224", "vovnet39a", "xception41", "xcit_nano_12_p16_224",
)  # fmt: skip
# Left out: nasnetalarge, pnasnet5large, deepseek_vit, gemma4_vit, mobilenetv5 (over 80 million parameters, no small member).

_COUNTED = {
    # Found: 1 + 12 * 2. The bias of its keys is a buffer of zeros that is not in the state dict. No recording can tell that
    # from a state that is set later, so it is a fixed vector, which holds the heads and the units of queries and keys.
    "beit_base_patch16_224": 1 + 12 * 4,
    "deit3_small_patch16_224": 1 + 12 * 4,
    "mixer_s16_224": 1 + 8 * 2,  # stream; inside of the token MLP and of the channel MLP in each block
    "convmixer_768_32": 1 + 32,  # every pointwise convolution makes a new width, every depthwise one keeps it
}


def timm_architectures() -> Iterator[Architecture]:
    """A small member or two of each family."""
    declare_missing_operators()
    for name in _NAMES:
        yield Architecture("timm", name, lambda name=name: _make(name), counted=_COUNTED.get(name))


def _make(name: str) -> Example:
    """The model for the smallest images that it takes."""
    import timm

    try:
        default = max(timm.get_pretrained_cfg(name).input_size[1:])
    except RuntimeError as error:
        raise NotMade(str(error)) from error
    for size in sorted({64, 96, 128, default} & set(range(default + 1))):
        for options in ({"img_size": size}, {}):
            try:
                model = timm.create_model(name, pretrained=False, **options).eval()
                with torch.no_grad():
                    model(torch.randn(2, 3, size, size))
            except (TypeError, ValueError, RuntimeError, AssertionError):
                continue
            return Example(model, images(), size, (size + 32,))
    raise NotMade("takes none of the sizes tried")
