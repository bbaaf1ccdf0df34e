"""The layers against transformers' GPT-2 and Llama from the same weights."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from training_cases import PatternSource, tiny_config

from training.checkpoint import state_tensors
from training.gradients import local_parameters
from training.mesh import build_mesh, init_single_rank
from training.scoring import Scorer
from training.trainer import build_stage

transformers = pytest.importorskip("transformers", reason="the reference models are in the dev extra")


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    init_single_rank()
    yield
    dist.destroy_process_group()


def _our_logits_and_weights(family: str, tokens: Tensor, **model: object) -> tuple[Tensor, dict[str, Tensor]]:
    config = tiny_config(family, precision="float32", model={"init_std": 0.2, **model})
    mesh = build_mesh(config.layout)
    stage = build_stage(config, mesh)
    weights = {name: t.full_tensor() for name, t in state_tensors(local_parameters(stage), mesh).items()}
    return Scorer(stage, mesh).logits(tokens), weights


def _split_qkv(weight: Tensor, groups: int, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    grouped = weight.view(groups, heads // groups + 2, width, *weight.shape[1:])
    q, k, v = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    return tuple(part.reshape(-1, *weight.shape[1:]) for part in (q, k, v))  # type: ignore[return-value]


def test_gpt2_logits_equal_those_of_transformers() -> None:
    tokens = torch.from_numpy(PatternSource().tokens(range(3)))[:, :-1]
    ours, weights = _our_logits_and_weights("gpt2", tokens)
    settings = transformers.GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    reference = transformers.GPT2LMHeadModel(settings).eval()
    state = {
        "transformer.wte.weight": weights["embedding.word.weight"],
        "transformer.wpe.weight": weights["embedding.position.weight"],
        "transformer.ln_f.weight": weights["final_norm.weight"],
        "transformer.ln_f.bias": weights["final_norm.bias"],
        "lm_head.weight": weights["embedding.word.weight"],
    }
    for n in range(2):
        for kind in ("weight", "bias"):
            ours_n, theirs_n = f"layers.{n}", f"transformer.h.{n}"
            qkv = torch.cat(_split_qkv(weights[f"{ours_n}.attn.qkv.{kind}"], 4, 4, 8))
            linear = {
                "attn.c_attn": qkv,
                "attn.c_proj": weights[f"{ours_n}.attn.out.{kind}"],
                "mlp.c_fc": weights[f"{ours_n}.mlp.up.{kind}"],
                "mlp.c_proj": weights[f"{ours_n}.mlp.down.{kind}"],
            }
            for name, value in linear.items():
                state[f"{theirs_n}.{name}.{kind}"] = value.t() if kind == "weight" else value
            state[f"{theirs_n}.ln_1.{kind}"] = weights[f"{ours_n}.attn.norm.{kind}"]
            state[f"{theirs_n}.ln_2.{kind}"] = weights[f"{ours_n}.mlp.norm.{kind}"]
    reference.load_state_dict(state)

    with torch.no_grad():
        theirs = reference(tokens).logits[..., :100]

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_llama_logits_equal_those_of_transformers(tied: bool) -> None:
    tokens = torch.from_numpy(PatternSource().tokens(range(3)))[:, :-1]
    ours, weights = _our_logits_and_weights("llama", tokens, tied_embeddings=tied, ffn_hidden_size=48)
    settings = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    reference = transformers.LlamaForCausalLM(settings).eval()
    state = {
        "model.embed_tokens.weight": weights["embedding.word.weight"],
        "model.norm.weight": weights["final_norm.weight"],
        "lm_head.weight": weights["embedding.word.weight" if tied else "output.weight"],
    }
    for n in range(2):
        q, k, v = _split_qkv(weights[f"layers.{n}.attn.qkv.weight"], 2, 4, 8)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": weights[f"layers.{n}.attn.out.weight"],
            "mlp.gate_proj": weights[f"layers.{n}.mlp.gate.weight"],
            "mlp.up_proj": weights[f"layers.{n}.mlp.up.weight"],
            "mlp.down_proj": weights[f"layers.{n}.mlp.down.weight"],
            "input_layernorm": weights[f"layers.{n}.attn.norm.weight"],
            "post_attention_layernorm": weights[f"layers.{n}.mlp.norm.weight"],
        }
        state.update({f"model.layers.{n}.{name}.weight": value for name, value in parts.items()})
    reference.load_state_dict(state)

    with torch.no_grad():
        theirs = reference(tokens).logits[..., :100]

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
