"""What a Trainer's strategy does around optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from torch_offload import finish, is_offloaded, last_microbatch

from .overlap import Choice, choose, look
from .strategy import OffloadMixin


class TrainerMixin(OffloadMixin):
    """Converts the optimizers of a LightningModule, and leaves their state where it is."""

    model: Any
    lightning_module: Any
    #: What was chosen for the last fit.
    _choice: Choice | None = None
    _hides_optimizers = False

    def setup(self, trainer: Any) -> None:
        """Choose when chunks are updated, and do what Lightning does.

        Lightning ends by moving the state of all optimizers to the root device: it is shown none.

        Raises:
            ValueError: the chosen overlap cannot be used with this Trainer or module.
        """
        if trainer.state.fn == "fit":
            loop = look(trainer, self.lightning_module, self)
            self._choice = choose(self.offload_config.overlap, loop)
        try:
            super().setup(trainer)
        finally:
            self._hides_optimizers = False

    def setup_precision_plugin(self) -> None:
        """Do what Lightning does; it is the last thing in `setup` that may see the optimizers."""
        super().setup_precision_plugin()
        self._hides_optimizers = True

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers, converted. Lightning and callbacks assign them several times."""
        return [] if self._hides_optimizers else super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            # Lightning puts a mock in the place of an optimizer that a module does not have.
            if self._choice is not None and type(optimizer).__name__ != "_MockOptimizer":
                self._offload(optimizer, self._choice, self.model)
        # After the conversion: Lightning's proxies derive from the optimizer's class.
        super(TrainerMixin, type(self)).optimizers.__set__(self, optimizers)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step, and say that the backward inside of it is the last one of the step.

        In automatic optimization the closure is the micro-batch that steps; those that accumulate
        run without this method. In manual optimization the closure does nothing.
        """

        def last() -> Any:
            with last_microbatch(optimizer):
                return closure()

        is_last = is_offloaded(optimizer) and self.lightning_module.automatic_optimization
        return super().optimizer_step(optimizer, last if is_last else closure, model, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the parameters, also for who saves them when a step was interrupted."""
        if self.lightning_module.trainer.state.status == "interrupted":
            self._finish()
        return super().lightning_module_state_dict()  # type: ignore[no-any-return]

    def teardown(self) -> None:
        """Wait for all updates and copies before the model leaves the GPU."""
        self._finish()
        super().teardown()

    def _finish(self) -> None:
        for optimizer in self.optimizers:
            if is_offloaded(optimizer):
                finish(optimizer)


class OrdinaryStateMixin(TrainerMixin):
    """For strategies whose checkpoints hold what ``optimizer.state_dict()`` returns."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load into host memory. Lightning's method moves the loaded state to the root device."""
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=False):
            optimizer.load_state_dict(state)
