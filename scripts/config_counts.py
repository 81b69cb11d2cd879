"""Compares parameter counts of random configs with those of Transformers (`scripts/config_counts.py --seed 1 --count 8`).

Every family that `plan config.json` reads is drawn with random sizes and flags. Transformers builds the model on the `meta` device, so nothing is
allocated. Flags are left out at random; the program must then have the same defaults.
Prints every difference and the number of configs per family. The exit status is 1 if any count differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
# Fields without which a config is refused.
REQUIRED = {"hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "max_position_embeddings", "kv_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim", "patch_size", "image_size"}
SIZES = ("num_", "n_", "d_")
ACTIVATIONS = ["silu", "gelu", "gelu_new", "relu"]


def heads_of(draw: random.Random, even: int = 2) -> dict:
    """Query heads, key heads and a hidden size that they divide."""
    key_heads, repeat, size = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3]), even * draw.choice([2, 4, 7, 8, 16])
    heads = key_heads * repeat
    return {"num_attention_heads": heads, "num_key_value_heads": key_heads, "hidden_size": heads * size}


def usual(draw: random.Random) -> dict:
    """The fields of Llama and its relatives."""
    fields = {**heads_of(draw), "num_hidden_layers": draw.randint(1, 5), "intermediate_size": draw.randint(1, 90) * 2,
              "vocab_size": draw.randint(2, 700), "tie_word_embeddings": draw.random() < 0.5, "hidden_act": draw.choice(ACTIVATIONS)}
    if draw.random() < 0.5:
        fields["head_dim"] = 2 * draw.randint(2, 20)
    return fields


def moe(draw: random.Random, count: str) -> dict:
    """Experts."""
    experts = draw.randint(2, 9)
    return {count: experts, "num_experts_per_tok": draw.randint(1, experts)}


def llama(draw: random.Random) -> dict:
    return {**usual(draw), "attention_bias": draw.random() < 0.4, "mlp_bias": draw.random() < 0.4}


def mistral(draw: random.Random) -> dict:
    return {**usual(draw), "sliding_window": draw.choice([None, 16])}


def mixtral(draw: random.Random) -> dict:
    return {**usual(draw), **moe(draw, "num_local_experts")}


def qwen2(draw: random.Random) -> dict:
    return {**usual(draw), "use_sliding_window": draw.random() < 0.3, "sliding_window": 16, "max_window_layers": draw.randint(0, 3)}


def sparse(draw: random.Random, fields: dict) -> dict:
    """Qwen's experts: in some layers only."""
    layers = fields["num_hidden_layers"]
    return {**fields, **moe(draw, "num_experts"), "moe_intermediate_size": draw.randint(1, 40), "decoder_sparse_step": draw.randint(1, 3),
            "mlp_only_layers": sorted(draw.sample(range(layers), draw.randint(0, layers // 2))), "norm_topk_prob": draw.random() < 0.5}


def qwen2_moe(draw: random.Random) -> dict:
    fields = sparse(draw, usual(draw))
    fields["shared_expert_intermediate_size"] = draw.randint(1, 60)
    fields["qkv_bias"] = draw.random() < 0.5
    return fields


def qwen3(draw: random.Random) -> dict:
    return {**usual(draw), "attention_bias": draw.random() < 0.4}


def qwen3_moe(draw: random.Random) -> dict:
    return sparse(draw, qwen3(draw))


def gemma2(draw: random.Random) -> dict:
    fields = usual(draw)
    fields["hidden_activation"] = fields.pop("hidden_act")
    return {**fields, "head_dim": 2 * draw.randint(2, 20), "attention_bias": draw.random() < 0.4, "query_pre_attn_scalar": draw.randint(1, 256)}


def phi(draw: random.Random) -> dict:
    fields = usual(draw)
    fields.pop("head_dim", None)
    return {**fields, "qk_layernorm": draw.random() < 0.4, "partial_rotary_factor": 0.5}


def phi3(draw: random.Random) -> dict:
    fields = usual(draw)
    fields.pop("head_dim", None)
    return {**fields, "sliding_window": draw.choice([None, 16]), "pad_token_id": 0}


def gpt2(draw: random.Random) -> dict:
    heads = draw.randint(1, 6)
    return {"n_head": heads, "n_embd": heads * draw.randint(2, 20), "n_layer": draw.randint(1, 5), "vocab_size": draw.randint(2, 700),
            "n_positions": draw.randint(8, 300), "n_inner": draw.choice([None, draw.randint(1, 200)]), "tie_word_embeddings": draw.random() < 0.7}


def gpt_neox(draw: random.Random) -> dict:
    fields = {**heads_of(draw, 4), "num_hidden_layers": draw.randint(1, 5), "intermediate_size": draw.randint(1, 200), "vocab_size": draw.randint(2, 700),
              "rotary_pct": 0.5, "tie_word_embeddings": draw.random() < 0.5, "attention_bias": draw.random() < 0.5,
              "use_parallel_residual": draw.random() < 0.5}
    del fields["num_key_value_heads"]
    return fields


def deepseek(draw: random.Random) -> dict:
    groups, size = draw.choice([1, 2, 4]), draw.randint(2, 4)
    top = draw.randint(1, groups)
    return {"num_attention_heads": (heads := draw.randint(1, 5)), "num_key_value_heads": heads, "hidden_size": heads * draw.randint(2, 20),
            "num_hidden_layers": draw.randint(1, 5), "intermediate_size": draw.randint(1, 200), "moe_intermediate_size": draw.randint(1, 60),
            "vocab_size": draw.randint(2, 700), "q_lora_rank": draw.choice([None, draw.randint(2, 40)]), "kv_lora_rank": draw.randint(2, 40),
            "qk_nope_head_dim": draw.randint(2, 30), "qk_rope_head_dim": 2 * draw.randint(1, 10), "v_head_dim": draw.randint(2, 30),
            "n_routed_experts": groups * size, "n_group": groups, "topk_group": top, "num_experts_per_tok": draw.randint(1, top * size),
            "n_shared_experts": draw.randint(1, 3), "first_k_dense_replace": draw.randint(0, 3), "attention_bias": draw.random() < 0.4,
            "tie_word_embeddings": draw.random() < 0.4}


def bert(draw: random.Random) -> dict:
    fields = heads_of(draw)
    del fields["num_key_value_heads"]
    return {**fields, "num_hidden_layers": draw.randint(1, 5), "intermediate_size": draw.randint(1, 200), "vocab_size": draw.randint(2, 700),
            "max_position_embeddings": draw.randint(8, 300), "type_vocab_size": draw.randint(1, 4), "hidden_act": draw.choice(ACTIVATIONS),
            "architectures": [draw.choice(["BertForMaskedLM", "BertForPreTraining"])]}


def t5(draw: random.Random) -> dict:
    # Transformers 5 ties the logits of every T5; T5 1.1's published weights have a table of their own, as `tie_word_embeddings = false` says.
    return {"d_model": draw.randint(4, 100), "num_heads": draw.randint(1, 6), "d_kv": draw.randint(2, 30), "d_ff": draw.randint(1, 200),
            "num_layers": draw.randint(1, 4), "num_decoder_layers": draw.choice([None, draw.randint(1, 4)]), "vocab_size": draw.randint(2, 700),
            "feed_forward_proj": draw.choice(["relu", "gated-gelu", "gated-silu"]), "relative_attention_num_buckets": 2 * draw.randint(2, 20)}


def vit(draw: random.Random) -> dict:
    fields, patch = heads_of(draw), draw.choice([2, 4, 7, 8])
    del fields["num_key_value_heads"]
    labels = draw.choice([0, draw.randint(1, 50)])
    return {**fields, "num_hidden_layers": draw.randint(1, 5), "intermediate_size": draw.randint(1, 200), "patch_size": patch,
            "image_size": patch * draw.randint(1, 12), "num_channels": draw.randint(1, 4), "qkv_bias": draw.random() < 0.5,
            **({"id2label": {str(at): f"class {at}" for at in range(labels)}} if labels else {})}


FAMILIES = {"llama": llama, "mistral": mistral, "mixtral": mixtral, "qwen2": qwen2, "qwen2_moe": qwen2_moe, "qwen3": qwen3, "qwen3_moe": qwen3_moe,
            "gemma": llama, "gemma2": gemma2, "gemma3_text": gemma2, "phi3": phi3, "phi": phi, "gpt2": gpt2, "gpt_neox": gpt_neox,
            "deepseek_v2": deepseek, "deepseek_v3": deepseek, "bert": bert, "t5": t5, "vit": vit}


def reference(family: str, fields: dict) -> int:
    """The number of parameters of Transformers' model."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(family, **fields)
    classes = {"bert": transformers.AutoModelForPreTraining, "t5": transformers.AutoModelForSeq2SeqLM, "vit": transformers.AutoModelForImageClassification}
    kind = classes.get(family, transformers.AutoModelForCausalLM)
    if fields.get("architectures") == ["BertForMaskedLM"]:
        kind = transformers.AutoModelForMaskedLM
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind.from_config(config).parameters())


def ours(program: str, path: Path) -> int | str:
    """The number of parameters that the program counts, or its message."""
    length = [] if path.name.startswith("vit") else ["--seq", "8"]
    run = subprocess.run([program, "models", str(path), "--batch", "1", *length, "--json"], capture_output=True, text=True)
    if run.returncode != 0:
        return run.stderr.strip()
    answer = json.loads(run.stdout)
    return (answer[0] if isinstance(answer, list) else answer)["parameters"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=8, help="configs per family")
    parser.add_argument("--program", default=str(ROOT / "target/release/shardwright"))
    parser.add_argument("--only", help="one family")
    options = parser.parse_args()
    equal, named, wrong = Counter(), Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        for family, make in FAMILIES.items():
            if options.only not in (None, family):
                continue
            for number in range(options.count):
                draw = random.Random(f"{options.seed} {family} {number}")
                fields = make(draw)
                # Transformers writes all sizes into its files; flags and the like may be missing.
                optional = [name for name in sorted(fields) if name not in REQUIRED and not name.startswith(SIZES)]
                if number % 2 and optional:
                    for name in draw.sample(optional, min(2, len(optional))):
                        del fields[name]
                try:
                    expected = reference(family, fields)
                except Exception as error:  # A default that the drawn sizes contradict.
                    expected = f"{type(error).__name__}: {error}".splitlines()[0]
                path = Path(folder) / f"{family}-{number}.json"
                path.write_text(json.dumps({"model_type": family, **fields}))
                found = ours(options.program, path)
                if found == expected:
                    equal[family] += 1
                elif isinstance(found, str) or isinstance(expected, str):
                    named[family] += 1
                    print(f"{family} {number}: {found if isinstance(found, str) else f'{found:,}'} | Transformers: {expected} | {json.dumps(fields)}")
                else:
                    wrong += 1
                    print(f"{family} {number}: {found:,} parameters, Transformers {expected:,}: {json.dumps(fields)}")
    print(f"{sum(equal.values())} equal in {len(equal)} families, {wrong} different, {sum(named.values())} refused by one of the two")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
