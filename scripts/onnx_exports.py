#!/usr/bin/env python3
"""Exports small models of torchvision and transformers with both of PyTorch's exporters, with onnxruntime's results.

    scripts/onnx_exports.py OUT [NAME...]

Each case is a folder OUT/NAME.EXPORTER as `scripts/onnx_cases.py` writes them; the example `onnx_check` of the onnx
crate runs them through our interpreter. Needs torch, torchvision, transformers, onnx, onnxscript and onnxruntime.
"""

import logging
import pathlib
import sys
import warnings

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from onnx_cases import write_case


def vision(name, *arguments, size=64, **options):
    import torchvision

    def build():
        return getattr(torchvision.models, name)(*arguments, weights=None, num_classes=10, **options)

    return build, (torch.randn(2, 3, size, size),)


def image_transformer(name, size=32, **options):
    """A model whose class takes all sizes."""
    import torchvision

    module = getattr(torchvision.models, name[0])
    return lambda: getattr(module, name[1])(**options), (torch.randn(2, 3, size, size),)


def language(config, model, **options):
    import transformers

    def build():
        made = getattr(transformers, config)(
            vocab_size=100, use_cache=False, attn_implementation=options.pop("attention", "sdpa"), **options
        )
        return First(getattr(transformers, model)(made))

    return build, (torch.randint(0, 100, (2, 16)),)


class First(nn.Module):
    """A model of transformers as a function from token ids to its first result."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, return_dict=False)[0]


class Recurrent(nn.Module):
    """A layer over a sequence, then a linear layer."""

    def __init__(self, layer, width, **options):
        super().__init__()
        self.layer = layer(8, 12, **options)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.layer(x)[0])


class WithLoss(nn.Module):
    """A classifier that ends in its loss, labels that do not count included."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.body(x), labels)


small_bert = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
small_llama = dict(small_bert, num_key_value_heads=2, max_position_embeddings=64)

MODELS = {
    "resnet18": lambda: vision("resnet18"),
    "densenet": lambda: image_transformer(
        ("densenet", "DenseNet"), growth_rate=8, block_config=(2, 2), num_init_features=16, num_classes=10
    ),
    "vit": lambda: image_transformer(
        ("vision_transformer", "VisionTransformer"), image_size=32, patch_size=8, num_layers=2, num_heads=4,
        hidden_dim=32, mlp_dim=64, num_classes=10,
    ),
    "swin": lambda: image_transformer(
        ("swin_transformer", "SwinTransformer"), patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=[4, 4], num_classes=10,
    ),
    "swin_v2": lambda: vision("swin_v2_t", size=64),
    "convnext": lambda: vision("convnext_tiny", size=64),
    "efficientnet": lambda: vision("efficientnet_b0", size=64),
    "efficientnet_v2": lambda: vision("efficientnet_v2_s", size=64),
    "mobilenet_v3": lambda: vision("mobilenet_v3_small", size=64),
    "regnet": lambda: vision("regnet_y_400mf", size=64),
    "shufflenet": lambda: vision("shufflenet_v2_x0_5", size=64),
    "maxvit": lambda: image_transformer(
        ("maxvit", "MaxVit"), size=64, input_size=(64, 64), stem_channels=8, partition_size=2,
        block_channels=[8, 16], block_layers=[1, 1], head_dim=4, stochastic_depth_prob=0.0, num_classes=10,
    ),
    "llama": lambda: language("LlamaConfig", "LlamaForCausalLM", **small_llama),
    "qwen2": lambda: language("Qwen2Config", "Qwen2ForCausalLM", **small_llama),
    "gemma": lambda: language("GemmaConfig", "GemmaForCausalLM", head_dim=8, **small_llama),
    "mistral": lambda: language("MistralConfig", "MistralForCausalLM", sliding_window=8, **small_llama),
    "gpt2": lambda: language("GPT2Config", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_neox": lambda: language("GPTNeoXConfig", "GPTNeoXForCausalLM", **small_bert),
    "bert": lambda: language("BertConfig", "BertForMaskedLM", **small_bert),
    "roberta": lambda: language("RobertaConfig", "RobertaForMaskedLM", **small_bert),
    "distilbert": lambda: language("DistilBertConfig", "DistilBertForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "albert": lambda: language("AlbertConfig", "AlbertForMaskedLM", embedding_size=16, **small_bert),
    "opt": lambda: language(
        "OPTConfig", "OPTForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        max_position_embeddings=64, word_embed_proj_dim=32,
    ),
    "lstm": lambda: (lambda: Recurrent(nn.LSTM, 24, num_layers=2, bidirectional=True), (torch.randn(7, 2, 8),)),
    "lstm_batch_first": lambda: (lambda: Recurrent(nn.LSTM, 12, batch_first=True), (torch.randn(2, 7, 8),)),
    "gru": lambda: (lambda: Recurrent(nn.GRU, 24, bidirectional=True), (torch.randn(7, 2, 8),)),
    "rnn": lambda: (lambda: Recurrent(nn.RNN, 12, nonlinearity="relu"), (torch.randn(7, 2, 8),)),
    "loss": lambda: (WithLoss, (torch.randn(6, 8), torch.tensor([0, 1, -100, 4, 2, 3]))),
}


def export(name, exporter, out):
    torch.manual_seed(0)
    build, inputs = MODELS[name]()
    model = build().eval()
    file = out / f"{name}.{exporter}.onnx"
    modern = dict(dynamo=True, external_data=False, optimize=True, verbose=False)
    options = modern if exporter == "dynamo" else dict(dynamo=False, opset_version=17)
    torch.onnx.export(model, inputs, str(file), **options)
    made = onnx.load(str(file))
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(file), session_options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    arrays = [x.numpy() for x in inputs][: len(names)]
    expected = session.run(None, dict(zip(names, arrays)))
    write_case(out / f"{name}.{exporter}", made, arrays, [np.asarray(e) for e in expected])
    file.unlink()


def main():
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or MODELS:
        for exporter in ("dynamo", "script"):
            try:
                export(name, exporter, out)
            except Exception as error:  # an exporter that fails is not our failure, but is worth a line
                reason = str(error).strip().splitlines() or [type(error).__name__]
                print(f"{name}.{exporter}: not exported: {reason[0][:160]}", file=sys.stderr)


if __name__ == "__main__":
    main()
