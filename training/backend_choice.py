"""Which set of layers a model gets: `local` or `te`."""

from training.backend import Backend
from training.config import ModelConfig
from training.context_parallel import WHOLE, ContextParallel
from training.layers import LocalBackend
from training.mesh import TensorParallel


def make_backend(model: ModelConfig, tp: TensorParallel, context: ContextParallel = WHOLE) -> Backend:
    """Return the backend that `model.backend` names.

    Raises:
        ConfigError: It is `te` and Transformer Engine is not installed.
    """
    if model.backend == "te":
        from training.te import TransformerEngineBackend

        return TransformerEngineBackend(model, tp, context)
    return LocalBackend(model, tp, context)
