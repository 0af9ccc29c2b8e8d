#!/usr/bin/env python3
"""Reference values for a tiny GPT-2, computed in float64 by PyTorch's autograd.

    python3 dev/reference.py [DIRECTORY]

writes reference_odd.safetensors and reference_round.safetensors into DIRECTORY (default: beside this script), which
test_gpt compares with. They are part of the repository; run this only to change them. Needs numpy and torch (any
version from 1.13 on). Running it again on the same machine gives the same bytes.

"odd" has sizes that divide by nothing and 12 sequences per step, so that 1, 2, 3, 4, 6 or 12 ranks can share them;
"round" has sizes that need no padding. Both train ten steps, each on fresh tokens, from random parameters in which
every bias and every norm's weight matters. Every tensor is F32 and dense:

    configuration           [V, C, NH, L, T, sequences, steps]
    settings                [lr, beta1, beta2, eps, weight decay, clip]
    tokens                  (steps, sequences, T+1) integers; the last of a sequence is only ever a target
    params.NAME             parameters before the first step, under Hugging Face's names, projections (in, out)
    logits                  (sequences, T, V) of the first step
    grads.NAME              gradients of the first step's loss, before clipping
    losses_hi, losses_lo    (steps) mean loss of the global batch before each update; hi + lo is the float64 value
    norms_hi, norms_lo      (steps) norm of that mean's gradient before clipping, the tied weight counted once
    mutant.M.losses_hi ...  the same four of a trainer with exactly one mistake, M; see MUTANTS

A test within LOSS_BOUND and NORM_BOUND of the reference passes a correct fp32 trainer and fails every mutant: both are
asserted here, with room to spare, and the figures are printed.
"""

import json
import math
import os
import struct
import sys
from typing import NamedTuple

import numpy as np
import torch

LOSS_BOUND = 2e-6  # relative, what the tests demand of fp32
NORM_BOUND = 2e-5
FP32_ROOM = 5  # PyTorch's own fp32 must stay this many times below the bounds ...
MUTANT_ROOM = 10  # ... and every mutant leave them this many times in at least one step

LR, BETA1, BETA2, EPS, DECAY, CLIP = 1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0
LAYERNORM_EPS = 1e-5
STEPS = 10

MUTANTS = {
    "erf_gelu": "GELU by the error function instead of its tanh form",
    "wpe_not_decayed": "no weight decay on the position embeddings",
    "layernorm_decayed": "weight decay on the norms' weights and biases",
    "layernorm_eps_outside": "(x - mean) / (deviation + eps)",
    "adamw_eps_inside": "m / sqrt(v + eps)",
    "attention_unscaled": "softmax(q k) without 1/sqrt(HS)",
    "norm_counts_tied_twice": "the tied weight's gradient twice in the norm that clips",
}


class Configuration(NamedTuple):
    name: str
    V: int
    C: int
    NH: int
    L: int
    T: int
    sequences: int
    seed: int


CONFIGURATIONS = (
    Configuration("odd", V=131, C=24, NH=3, L=2, T=17, sequences=12, seed=1),
    Configuration("round", V=128, C=32, NH=2, L=2, T=32, sequences=8, seed=3),
)


# ----------------------------------------------------------------------------------------------------------------------
# the data and the start


def make_tokens(conf, rng):
    """Few tokens are frequent and many are rare, so that there is something to learn from one step to the next."""
    uniform = rng.random((STEPS, conf.sequences, conf.T + 1))
    tokens = np.minimum((conf.V * uniform**2).astype(np.int64), conf.V - 1)
    tokens[0, 0, 0], tokens[0, 0, -1] = conf.V - 1, 0  # both ends of the vocabulary, as input and as target
    tokens[0, 1, 0], tokens[0, 1, -1] = 0, conf.V - 1
    return tokens


def parameter_shapes(conf):
    C = conf.C
    shapes = {"wte.weight": (conf.V, C), "wpe.weight": (conf.T, C)}
    for layer in range(conf.L):
        h = f"h.{layer}."
        shapes |= {h + "ln_1.weight": (C,), h + "ln_1.bias": (C,)}
        shapes |= {h + "attn.c_attn.weight": (C, 3 * C), h + "attn.c_attn.bias": (3 * C,)}
        shapes |= {h + "attn.c_proj.weight": (C, C), h + "attn.c_proj.bias": (C,)}
        shapes |= {h + "ln_2.weight": (C,), h + "ln_2.bias": (C,)}
        shapes |= {h + "mlp.c_fc.weight": (C, 4 * C), h + "mlp.c_fc.bias": (4 * C,)}
        shapes |= {h + "mlp.c_proj.weight": (4 * C, C), h + "mlp.c_proj.bias": (C,)}
    shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    return shapes


def make_parameters(conf, rng):
    """Embeddings are small, so that the first norm's eps is seen; all else is large, so that it matters.

    The seeds are chosen for calm: where a gradient is smaller than its rounding error, AdamW's first steps go either
    way, and with bad luck this is seen in the losses. (The keys' biases always have such a gradient, since softmax
    cancels them, but for the same reason nothing depends on them.)
    """
    parameters = {}
    for name, shape in parameter_shapes(conf).items():
        x = rng.standard_normal(shape)
        if name.startswith(("wte", "wpe")):
            x *= 0.1
        elif is_norm(name) and name.endswith("weight"):
            x = 1 + 0.2 * x
        else:
            x *= 0.25 if len(shape) == 2 else 0.2
        parameters[name] = x.astype(np.float32)
    return parameters


def is_norm(name):
    return ".ln_" in name or name.startswith("ln_")


# ----------------------------------------------------------------------------------------------------------------------
# the model


def layernorm(x, w, b, mutant):
    centered = x - x.mean(-1, keepdim=True)
    variance = (centered * centered).mean(-1, keepdim=True)
    if mutant == "layernorm_eps_outside":
        return centered / (variance.sqrt() + LAYERNORM_EPS) * w + b
    return centered / (variance + LAYERNORM_EPS).sqrt() * w + b


def gelu(x, mutant):
    if mutant == "erf_gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(qkv, NH, mutant):
    B, T, C = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (part.view(B, T, NH, C // NH).transpose(1, 2) for part in qkv.split(C, dim=2))
    scale = 1.0 if mutant == "attention_unscaled" else 1 / math.sqrt(C // NH)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(future, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)


def logits_of(p, conf, tokens, mutant):
    def norm(x, name):
        return layernorm(x, p[name + ".weight"], p[name + ".bias"], mutant)

    def linear(x, name):
        return x @ p[name + ".weight"] + p[name + ".bias"]

    x = p["wte.weight"][tokens] + p["wpe.weight"][: tokens.shape[1]]
    for layer in range(conf.L):
        h = f"h.{layer}."
        qkv = linear(norm(x, h + "ln_1"), h + "attn.c_attn")
        x = x + linear(attention(qkv, conf.NH, mutant), h + "attn.c_proj")
        hidden = gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc"), mutant)
        x = x + linear(hidden, h + "mlp.c_proj")
    return norm(x, "ln_f") @ p["wte.weight"].T


# ----------------------------------------------------------------------------------------------------------------------
# training


def is_decayed(name, x, mutant):
    if mutant == "wpe_not_decayed" and name == "wpe.weight":
        return False
    return x.dim() == 2 or (mutant == "layernorm_decayed" and is_norm(name))


@torch.no_grad()
def update(p, moments, norm, step, mutant):
    scale = min(1.0, CLIP / (norm + 1e-6))
    for name, w in p.items():
        m, v = moments[name]
        g = w.grad * scale
        m.mul_(BETA1).add_(g, alpha=1 - BETA1)
        v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        m_hat, v_hat = m / (1 - BETA1**step), v / (1 - BETA2**step)
        root = (v_hat + EPS).sqrt() if mutant == "adamw_eps_inside" else v_hat.sqrt() + EPS
        w -= LR * (m_hat / root + (DECAY if is_decayed(name, w, mutant) else 0.0) * w)


def gradients(p, conf, batch, pieces, mutant):
    """The mean loss over the batch, its gradients (left in p's .grad) and the logits, in so many micro-batches."""
    for x in p.values():
        x.grad = None
    loss, logits = 0.0, []
    for piece in torch.from_numpy(batch).tensor_split(pieces):
        logits.append(logits_of(p, conf, piece[:, :-1], mutant))
        log_p = logits[-1].log_softmax(-1).gather(-1, piece[:, 1:].unsqueeze(-1))
        part = -log_p.sum() / (conf.sequences * conf.T)
        part.backward()
        loss += part.item()
    return loss, torch.cat(logits).detach().numpy()


def train(conf, parameters, tokens, dtype=torch.float64, pieces=1, mutant=None):
    """Ten steps; returns losses, norms, and the first step's logits and gradients."""
    p = {name: torch.tensor(x, dtype=dtype, requires_grad=True) for name, x in parameters.items()}
    moments = {name: (torch.zeros_like(x), torch.zeros_like(x)) for name, x in p.items()}
    losses, norms, first = [], [], None
    for step in range(1, STEPS + 1):
        loss, logits = gradients(p, conf, tokens[step - 1], pieces, mutant)
        if first is None:
            first = logits, {name: x.grad.numpy().copy() for name, x in p.items()}
        squares = {name: float((x.grad.double() ** 2).sum()) for name, x in p.items()}
        total = sum(squares.values())
        if mutant == "norm_counts_tied_twice":
            total += squares["wte.weight"]
        losses.append(loss)
        norms.append(math.sqrt(total))
        update(p, moments, norms[-1], step, mutant)
    return np.array(losses), np.array(norms), *first


# ----------------------------------------------------------------------------------------------------------------------
# the file


def write_safetensors(path, tensors):
    header, offset = {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            file.write(x.astype("<f4").tobytes())


def add_pair(tensors, name, x):
    """A float64 array as two of float32."""
    high = x.astype(np.float32)
    tensors[name + "_hi"] = high
    tensors[name + "_lo"] = (x - high).astype(np.float32)


def deviations(run, reference):
    """The largest relative deviation of the losses and of the norms."""
    return tuple(float(np.max(np.abs(a / b - 1))) for a, b in zip(run[:2], reference[:2]))


def make_reference(conf, path):
    rng = np.random.Generator(np.random.PCG64(conf.seed))
    parameters, tokens = make_parameters(conf, rng), make_tokens(conf, rng)
    reference = train(conf, parameters, tokens)
    losses, norms, logits, grads = reference
    print(f"{conf.name}: losses {losses[0]:.4f} to {losses[-1]:.4f}, norms {norms.min():.3f} to {norms.max():.3f}")

    for pieces in (1, 2, conf.sequences):
        away = deviations(train(conf, parameters, tokens, dtype=torch.float32, pieces=pieces), reference)
        print(f"    {f'fp32 in {pieces} pieces':24} losses {away[0]:.1e}  norms {away[1]:.1e}")
        assert away[0] * FP32_ROOM < LOSS_BOUND and away[1] * FP32_ROOM < NORM_BOUND, "fp32 is near the bounds"

    sizes = [conf.V, conf.C, conf.NH, conf.L, conf.T, conf.sequences, STEPS]
    tensors = {
        "configuration": np.array(sizes, np.float32),
        "settings": np.array([LR, BETA1, BETA2, EPS, DECAY, CLIP], np.float32),
        "tokens": tokens.astype(np.float32),
    }
    tensors |= {"params." + name: x for name, x in parameters.items()}
    tensors["logits"] = logits.astype(np.float32)
    tensors |= {"grads." + name: x.astype(np.float32) for name, x in grads.items()}
    add_pair(tensors, "losses", losses)
    add_pair(tensors, "norms", norms)
    for mutant in MUTANTS:
        run = train(conf, parameters, tokens, mutant=mutant)
        away = deviations(run, reference)
        times = max(away[0] / LOSS_BOUND, away[1] / NORM_BOUND)
        print(f"    {mutant:24} losses {away[0]:.1e}  norms {away[1]:.1e}  {times:.0f} times the bounds")
        assert times > MUTANT_ROOM, f"{mutant} is not told from the reference"
        add_pair(tensors, f"mutant.{mutant}.losses", run[0])
        add_pair(tensors, f"mutant.{mutant}.norms", run[1])
    write_safetensors(path, tensors)
    print(f"    {os.path.basename(path)}: {len(tensors)} tensors, {os.path.getsize(path)} bytes")


def main():
    torch.set_num_threads(1)  # one order of summation
    directory = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    for conf in CONFIGURATIONS:
        make_reference(conf, os.path.join(directory, f"reference_{conf.name}.safetensors"))


if __name__ == "__main__":
    main()
