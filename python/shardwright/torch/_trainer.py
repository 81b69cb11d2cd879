"""Hugging Face's `Trainer` for planned modules."""

from __future__ import annotations

from typing import Any


def planned_trainer(base: type) -> type:
    """A subclass of `transformers.Trainer` (or of a subclass of it) for modules of `parallelize`.

    Every process passes whole batches, and neither Trainer nor accelerate distributes the module or the data:

        Planned = planned_trainer(transformers.Trainer)
        Planned(model=parallelize(model, example), args=arguments, train_dataset=data).train()
    """
    from accelerate.utils import DistributedType  # type: ignore[import-not-found]

    class PlannedTrainer(base):  # type: ignore[valid-type,misc]
        def create_accelerator_and_postprocess(self) -> Any:
            result = super().create_accelerator_and_postprocess()
            # One process as far as Trainer is concerned: the plan knows of the others.
            self.accelerator.state.distributed_type = DistributedType.NO
            self.accelerator.prepare_data_loader = lambda loader, *_, **__: loader
            return result

        def _set_signature_columns_if_needed(self) -> None:
            # The columns that the module's own forward pass takes.
            planned: Any = self.model
            self.model: Any = getattr(planned, "_original", planned)
            try:
                super()._set_signature_columns_if_needed()
            finally:
                self.model = planned

        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            return model

    PlannedTrainer.__name__ = f"Planned{base.__name__}"
    return PlannedTrainer
