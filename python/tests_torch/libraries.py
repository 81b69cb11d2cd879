"""Libraries around PyTorch's training loops, each compared with one process: `libraries.py RANK WORLD PORT FOLDER`.

A library that is not installed is reported as missing."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from processes import run_cases
from torch import distributed

from shardwright.torch import parallelize

Results = dict[str, Any]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=32,
            max_position_embeddings=32, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def tokens() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(2, 32, (8, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def difference(mine: Any, theirs: Any) -> float:
    """The largest difference of two modules' weights."""
    own = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in mine.named_parameters()}
    return max(float((own[n].detach() - p.detach()).abs().max()) for n, p in theirs.named_parameters())


def lora() -> Results:
    """PEFT's adapters: the frozen weights get no gradients."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    module = get_peft_model(llama(), config)
    for name, p in module.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.1)
    alone, given = copy.deepcopy(module), tokens()
    model = parallelize(module, given, solver="fsdp", progress=False)
    trained = []
    for m in (alone, model):
        update = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01)
        for _ in range(2):
            m(**given).loss.backward()
            update.step()
            update.zero_grad()
        trained.append(sum(p.requires_grad for p in m.parameters()))
    return {"difference": difference(model, alone), "trained": trained, "frozen": sum(not p.requires_grad for p in model.parameters())}


def generated() -> Results:
    """`generate`, evaluation and `save_pretrained`."""
    module, given = llama().eval(), tokens()
    alone = copy.deepcopy(module)
    model = parallelize(module, given, solver="megatron", progress=False)
    prompt = given["input_ids"][:2, :4]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
    want = alone.generate(prompt, **options)
    with torch.no_grad():
        got = model.generate(prompt, **options)
    state = model.full_state_dict()
    folder = f"{sys.argv[4]}/saved"
    # The first process writes.
    alone.save_pretrained(folder, state_dict=state, is_main_process=distributed.get_rank() == 0)
    distributed.barrier()
    again = type(alone).from_pretrained(folder)
    return {"same": bool(torch.equal(got, want)), "difference": difference(again, alone), "length": got.shape[1]}


def trainer() -> Results:
    """Hugging Face's Trainer: each process passes whole batches, and nothing else distributes the module."""
    from transformers import Trainer, TrainingArguments

    from shardwright.torch import planned_trainer

    given = tokens()
    rows = [{name: value[i] for name, value in given.items()} for i in range(8)] * 2
    arguments = TrainingArguments(
        output_dir=f"{sys.argv[4]}/trainer", per_device_train_batch_size=8, max_steps=3, learning_rate=0.01, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", seed=3, max_grad_norm=1.0, logging_strategy="no",
    )  # fmt: skip
    module = llama()
    alone = copy.deepcopy(module)
    model = parallelize(module, given, solver="data", progress=False)
    for m in (model, alone):
        planned_trainer(Trainer)(model=m, args=arguments, train_dataset=rows).train()
    return {"difference": difference(model, alone), "moved": difference(alone, llama())}


def lightning() -> Results:
    """Lightning: each process trains by itself on whole batches."""
    import lightning as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Task(pl.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    given, found = tokens(), []
    module = llama()
    model = parallelize(copy.deepcopy(module), given, solver="fsdp", progress=False)
    for m in (module, model):
        torch.manual_seed(2)
        loader = torch.utils.data.DataLoader([{n: v[i] for n, v in given.items()} for i in range(8)], batch_size=8)
        fit = pl.Trainer(
            accelerator="cpu", strategy=SingleDeviceStrategy(device="cpu"), plugins=[LightningEnvironment()], max_steps=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        )  # fmt: skip
        fit.fit(Task(m), loader)
        found.append(m)
    return {"difference": difference(found[1], found[0]), "moved": difference(found[0], llama())}


def where_installed(name: str, case: Callable[[], Results]) -> Callable[[], Results]:
    return case if importlib.util.find_spec(name) is not None else lambda: {"missing": name}


CASES = {
    "generate": generated,
    "lora": where_installed("peft", lora),
    "trainer": where_installed("accelerate", trainer),
    "lightning": where_installed("lightning", lightning),
}

if __name__ == "__main__":
    run_cases(CASES)
