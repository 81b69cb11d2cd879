#!/usr/bin/env python3
"""Plans and runs PyTorch models of many libraries, and compares each with a single process: loss and all gradients, in
training mode with dropout, in 64 bits.

    torchrun --nproc-per-node 2 scripts/torch_coverage.py --families own,more,ops,hf,torchvision,detection,timm --solver exact

Prints one JSON line per model, then a table for docs/torch.md. A family whose library is not installed is skipped.
Needs torch and the Python package; transformers, torchvision and timm for their families.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch_architectures import ARCHITECTURES, OPS, OneOp
from torch_more import DECODERS, ENCODERS, MORE, SIZES

#: What a builder returns: a module, its arguments by name or position, and how the loss follows from the result.
Built = tuple[nn.Module, Any, Callable[[Any], torch.Tensor]]


def first_loss(result: Any) -> torch.Tensor:
    """The loss in a result, or the mean square of its tensors."""
    loss = getattr(result, "loss", None)
    if loss is not None:
        return loss
    leaves = [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, torch.Tensor) and r.is_floating_point()]
    return sum(r.square().mean() for r in leaves)


# Hugging Face, from configs.

SMALL = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embedding_size": 32, "num_hidden_layers": 2, "n_layer": 2,
    "num_layers": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "ffn_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_ff": 64,
    "hidden_dim": 64, "d_kv": 8, "head_dim": 8, "vocab_size": 128, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "seq_length": 64, "image_size": 32, "patch_size": 8,
    "n_inner": 64, "rotary_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "state_size": 8, "time_step_rank": 4, "num_labels": 8, "ffn_hidden_size": 64,
    "attention_hidden_size": 32, "decoder_vocab_size": 128, "layer_types": None,
}  # fmt: skip
CAUSAL = (
    "gpt2 llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 phi phi3 opt bloom falcon gpt_neo gpt_neox gptj "
    "codegen mpt stablelm starcoder2 cohere olmo olmo2 granite deepseek_v3 xglm biogpt persimmon nemotron gpt_bigcode glm "
    "mamba openai-gpt"
).split()
MASKED = (
    "bert roberta distilbert albert electra deberta-v2 mpnet xlm-roberta camembert ernie mobilebert squeezebert convbert"
).split()
SEQUENCES = "t5 bart pegasus mbart marian blenderbot m2m_100".split()
IMAGES = "vit deit beit dinov2 convnext resnet swin".split()


def hugging_face() -> Iterator[tuple[str, Callable[[], Built]]]:
    import transformers
    from transformers import AutoConfig

    transformers.logging.set_verbosity_error()

    def config(kind: str) -> Any:
        found = AutoConfig.for_model(kind)
        for name, value in SMALL.items():
            if hasattr(found, name) and (value is not None or name == "layer_types"):
                try:
                    if name == "layer_types":
                        found.layer_types = found.layer_types[: found.num_hidden_layers]
                    elif isinstance(getattr(found, name), (int, type(None))):
                        setattr(found, name, value)
                except (TypeError, ValueError, AttributeError, NotImplementedError):
                    pass
        for name, value in {
            "depths": [2, 2], "hidden_sizes": [16, 32], "embed_dim": 16, "window_size": 4, "stage_names": None,
            "attention_types": [[["global", "local"], 1]], "num_heads": [2, 4],
        }.items():  # fmt: skip
            if isinstance(getattr(found, name, None), list) and isinstance(value, list):
                setattr(found, name, value)
        if kind == "gpt_neo":
            found.attention_layers = ["global", "local"]
        if kind in ("resnet", "convnext"):
            found.hidden_sizes, found.depths, found.embedding_size = [16, 32], [1, 1], 16
            found.num_stages = 2
        if kind == "swin":
            found.embed_dim, found.depths, found.num_heads, found.window_size = 16, [2, 2], [2, 4], 2
            found.patch_size, found.hidden_size = 4, 32
        if kind == "mobilebert":
            found.intra_bottleneck_size, found.true_hidden_size = 32, 32
        if kind == "mpt":
            found.n_heads, found.n_layers, found.max_seq_len = 4, 2, 64
        if kind == "albert":
            found.num_hidden_groups = 1
        if kind == "t5":
            found.decoder_start_token_id = 0
        if kind == "deepseek_v3":
            found.head_dim, found.num_key_value_heads = 4, 4
        if kind == "mamba":
            found.intermediate_size = 64
        for name, value in SIZES.get(kind, {}).items():
            setattr(found, name, value)
        return found

    def ids(n: int = 4, s: int = 8) -> torch.Tensor:
        return torch.randint(3, 100, (n, s))

    def text(kind: str, auto: str) -> Callable[[], Built]:
        def build() -> Built:
            model = getattr(transformers, auto).from_config(config(kind))
            tokens = ids()
            given = {"input_ids": tokens, "labels": tokens.clone()}
            return model, given, first_loss

        return build

    def image(kind: str) -> Callable[[], Built]:
        def build() -> Built:
            model = transformers.AutoModelForImageClassification.from_config(config(kind))
            given = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,))}
            return model, given, first_loss

        return build

    def speech() -> Built:
        made = transformers.WhisperConfig(
            vocab_size=128, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=16,
            max_target_positions=16, num_mel_bins=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        model = transformers.WhisperForConditionalGeneration(made)
        return model, {"input_features": torch.randn(4, 16, 32), "labels": ids()}, first_loss

    for kind in [*CAUSAL, *DECODERS]:
        yield kind, text(kind, "AutoModelForCausalLM")
    for kind in [*MASKED, *ENCODERS]:
        yield kind, text(kind, "AutoModelForMaskedLM")
    for kind in SEQUENCES:
        yield kind, text(kind, "AutoModelForSeq2SeqLM")
    for kind in IMAGES:
        yield kind, image(kind)
    yield "whisper", speech


# Image libraries.

CLASSIFIERS = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 "
    "mobilenet_v2 mobilenet_v3_small regnet_y_400mf regnet_x_400mf resnet18 resnet50 resnext50_32x4d wide_resnet50_2 "
    "shufflenet_v2_x0_5 squeezenet1_0 swin_t swin_v2_t vgg11 vgg11_bn vit_b_32"
).split()
TIMM = (
    "resnet18 resnet26d resnetv2_50 resnext26ts seresnet18 ecaresnet26t efficientnet_b0 efficientnetv2_rw_t mobilenetv2_050 "
    "mobilenetv3_small_050 mobilenetv4_conv_small ghostnet_050 mnasnet_050 regnetx_002 regnety_002 densenet121 vgg11 "
    "convnext_atto convnextv2_atto convmixer_768_32 vit_tiny_patch16_224 deit_tiny_patch16_224 swin_tiny_patch4_window7_224 "
    "swinv2_tiny_window8_256 mixer_s32_224 gmlp_ti16_224 resmlp_12_224 poolformer_s12 cait_xxs24_224 crossvit_tiny_240 "
    "levit_128s mobilevit_xxs mobileone_s0 edgenext_xx_small coat_lite_tiny pvt_v2_b0 twins_svt_small xcit_nano_12_p16_224 "
    "beit_base_patch16_224 volo_d1_224 repvgg_a0 dla34 hrnet_w18_small xception41 nfnet_f0 tinynet_e fastvit_t8 davit_tiny "
    "efficientformer_l1 maxvit_tiny_tf_224"
).split()


def torchvision() -> Iterator[tuple[str, Callable[[], Built]]]:
    import torchvision as library

    def build(kind: str) -> Callable[[], Built]:
        def made() -> Built:
            size = {"inception_v3": 80, "vit_b_32": 224, "maxvit_t": 224, "alexnet": 64}.get(kind, 64)
            options = {"init_weights": False} if kind in ("googlenet", "inception_v3") else {}
            if kind == "inception_v3":
                # Its second classifier needs larger images.
                options["aux_logits"] = False
            model = getattr(library.models, kind)(num_classes=8, **options)
            return model, (torch.randn(4, 3, size, size),), first_loss

        return made

    for kind in CLASSIFIERS:
        yield kind, build(kind)


DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn fasterrcnn_resnet50_fpn maskrcnn_resnet50_fpn keypointrcnn_resnet50_fpn ssd300_vgg16 "
    "ssdlite320_mobilenet_v3_large retinanet_resnet50_fpn fcos_resnet50_fpn"
).split()


def detection() -> Iterator[tuple[str, Callable[[], Built]]]:
    import torchvision as library

    def build(kind: str) -> Callable[[], Built]:
        def made() -> Built:
            fixed = kind.startswith("ssd")
            sizes = {} if fixed else {"min_size": 64, "max_size": 64}
            if not kind.startswith("keypoint"):
                sizes["num_classes"] = 3
            model = getattr(library.models.detection, kind)(weights=None, weights_backbone=None, **sizes)
            if kind.startswith("keypoint"):
                # It takes key points in 32 bits only.
                model.register_forward_pre_hook(lambda _, given: (given[0], [{**t, "keypoints": t["keypoints"].float()} for t in given[1]]))
            images, targets = [], []
            for height, width in ((64, 64), (56, 64)):
                corner = torch.rand(2, 2) * 20
                boxes = torch.cat((corner, corner + 8 + torch.rand(2, 2) * 24), -1)
                target = {"boxes": boxes, "labels": torch.randint(1, 2 if kind.startswith("keypoint") else 3, (2,))}
                if kind.startswith("mask"):
                    target["masks"] = torch.randint(0, 2, (2, height, width), dtype=torch.uint8)
                if kind.startswith("keypoint"):
                    points = corner[:, None] + torch.rand(2, 17, 2) * 8
                    target["keypoints"] = torch.cat((points, torch.ones(2, 17, 1)), -1)
                images.append(torch.rand(3, height, width))
                targets.append(target)
            return model, (images, targets), lambda losses: sum(losses.values())

        return made

    for kind in DETECTORS:
        yield kind, build(kind)


def timm() -> Iterator[tuple[str, Callable[[], Built]]]:
    import timm as library

    def build(kind: str) -> Callable[[], Built]:
        def made() -> Built:
            model = library.create_model(kind, num_classes=8)
            size = model.default_cfg["input_size"][-1] if not _any_size(model) else 64
            return model, (torch.randn(2, 3, size, size),), first_loss

        return made

    for kind in TIMM:
        yield kind, build(kind)


def _any_size(model: nn.Module) -> bool:
    """Whether a smaller image works."""
    model.eval()
    try:
        with torch.no_grad():
            model(torch.randn(1, 3, 64, 64))
    except (RuntimeError, AssertionError, ValueError):
        return False
    finally:
        model.train()
    return True


# Users' own architectures, and single ops.


def own() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name, build in ARCHITECTURES.items():
        yield name, lambda build=build: (*build(), first_loss)


def ops() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name, function in OPS.items():
        yield name, lambda function=function: (OneOp(function), (torch.randn(4, 8, 8),), first_loss)


def more() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name, build in MORE.items():
        yield name, lambda build=build: (*build(), first_loss)


FAMILIES = {"own": own, "more": more, "ops": ops, "hf": hugging_face, "torchvision": torchvision, "detection": detection, "timm": timm}


def compare(build: Callable[[], Built], solver: str, machine: str | None) -> dict[str, Any]:
    """Plans a model and compares a pass with one process."""
    # Some kernels have no 64 bits.
    for wide in (True, False):
        found = _compare(build, solver, machine, wide)
        if found["verdict"] != "not here":
            break
    return found


def _compare(build: Callable[[], Built], solver: str, machine: str | None, wide: bool) -> dict[str, Any]:
    from shardwright.torch import parallelize

    torch.manual_seed(0)
    try:
        module, given, loss_of = build()
        module = (module.double() if wide else module.float()).train()
        given = torch.utils._pytree.tree_map(lambda x: _typed(x, wide), given)
        args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
        alone = copy.deepcopy(module)
        torch.manual_seed(1)
        want = loss_of(alone(*args, **kwargs))
        want.backward()
    except Exception as error:  # noqa: BLE001: the model does not run here at all.
        return {"verdict": "not here", "reason": _short(error)}
    started = time.perf_counter()
    try:
        model = parallelize(module, given, solver=solver, machine=machine, progress=False, time=20.0)
    except Exception as error:  # noqa: BLE001: recorded.
        return {"verdict": "refused", "reason": _short(error), "trace": traceback.format_exc()[-1500:]}
    seconds = time.perf_counter() - started
    replicated = [w for w in model.plan.warnings if "runs on whole tensors" in w]
    try:
        torch.manual_seed(1)
        got = loss_of(model(*args, **kwargs))
        got.backward()
    except Exception as error:  # noqa: BLE001: recorded.
        return {"verdict": "fails", "reason": _short(error), "trace": traceback.format_exc()[-1500:], "seconds": seconds}
    worst = abs(float(got.detach()) - float(want.detach())) / max(1.0, abs(float(want.detach())))
    theirs = dict(alone.named_parameters())
    for name, p in model.named_parameters():
        grad = theirs[name].grad
        if p.numel() == 0:
            continue
        if (grad is None) != (p.grad is None):
            worst = float("inf")
        elif grad is not None:
            size = max(float(grad.abs().max()), 1e-3)
            worst = max(worst, float((p.grad.full_tensor() - grad).abs().max()) / size)
    verdict = "equal" if worst < (1e-6 if wide else 1e-3) else "differs"
    return {"verdict": verdict, "worst": worst, "seconds": round(seconds, 2), "whole": len(replicated),
            "gathered": dict(model._engine.gathered)}  # fmt: skip


def _typed(x: Any, wide: bool) -> Any:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    return x.double() if wide else x.float()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", default="own,more,ops,hf,torchvision,detection,timm")
    parser.add_argument("--only", default="", help="names of models, all by default")
    parser.add_argument("--solver", default="exact")
    parser.add_argument("--machine")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after this long")
    parser.add_argument("--traces", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    signal.signal(signal.SIGALRM, _late)
    started, table = time.perf_counter(), {}
    first = distributed.get_rank() == 0
    for family in given.families.split(","):
        try:
            models = list(FAMILIES[family]())
        except ImportError as error:
            if first:
                print(f"{family}: skipped ({error})", flush=True)
            continue
        counts: dict[str, int] = {}
        for name, build in models:
            late = [time.perf_counter() - started > given.seconds]
            distributed.broadcast_object_list(late, src=0)
            if late[0] or (given.only and name not in given.only.split(",")):
                continue
            signal.alarm(300)
            found = compare(build, given.solver, given.machine)
            signal.alarm(0)
            counts[found["verdict"]] = counts.get(found["verdict"], 0) + 1
            if not given.traces:
                found.pop("trace", None)
            if first:
                print(json.dumps({"family": family, "model": name, **found}), flush=True)
        table[family] = counts
    if first:
        print("| family | models | planned | equal to one process | differs or fails | refused | not built here |")
        print("|---|---|---|---|---|---|---|")
        for family, counts in table.items():
            ran = sum(counts.values()) - counts.get("not here", 0)
            print(
                f"| {family} | {ran} | {ran - counts.get('refused', 0)} | {counts.get('equal', 0)} "
                f"| {counts.get('differs', 0) + counts.get('fails', 0)} | {counts.get('refused', 0)} | {counts.get('not here', 0)} |"
            )
    distributed.destroy_process_group()


def _late(*_: Any) -> None:
    raise TimeoutError("took longer than five minutes")


if __name__ == "__main__":
    main()
