"""Parameters that several pipeline stages use, each with a copy of its own, whose gradients are summed. No torch.

They are a tied token table, on the first and the last stage, and the relative positions of a stack
of T5, on every stage with a layer of it. The first stage's copy is the one that counts in a norm.
"""

from collections.abc import Mapping

from training.layout_config import LayoutConfig
from training.model_config import ModelConfig
from training.pipeline_split import layers_of_stages


def shared_parameters(model: ModelConfig, layout: LayoutConfig) -> Mapping[str, tuple[int, ...]]:
    """List the parameters that more than one stage holds: canonical name to the numbers of the stages, in order."""
    last = layout.num_stages - 1
    holders: dict[str, tuple[int, ...]] = {}
    if model.tied_embeddings:
        holders["embedding.word.weight"] = (0, last) if last else (0,)
    if model.position == "relative":
        holders |= {
            f"{stack}.relative.weight": stages_of_stack(model, layout, stack) for stack in ("encoder", "decoder")
        }
    return {name: stages for name, stages in holders.items() if len(stages) > 1}


def stages_of_stack(model: ModelConfig, layout: LayoutConfig, stack: str) -> tuple[int, ...]:
    """Stages that have a layer of the encoder or of the decoder."""
    is_decoder = stack == "decoder"
    return tuple(
        stage
        for stage, layers in enumerate(layers_of_stages(model, layout))
        if any(model.is_decoder_layer(layer) == is_decoder for layer in layers)
    )
