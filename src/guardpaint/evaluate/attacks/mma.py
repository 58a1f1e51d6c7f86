"""MMA: optimise tokens on a surrogate encoder until the embedding is close to the target's, without forbidden words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from guardpaint.errors import MissingCapability
from guardpaint.evaluate.attacks.gap import Gap, gap_of
from guardpaint.evaluate.attacks.system import Attempt, Target, attempt
from guardpaint.testbed.language import Attacker, Objective, whole_words

GRADIENT_READS = 3
"""What a gradient counts for in texts read: one pass forward, and one backward that takes about twice as long."""


@dataclass(frozen=True)
class Mma:
    """Coordinate search guided by the gradient of the similarity with respect to each token's embedding."""

    rounds: int = 12
    """Rounds before each query."""
    tokens: int = 5
    """Free tokens that replace the forbidden words."""
    top: int = 12
    """Replacements tried per round, drawn from twice as many that the gradient recommends for their place."""
    name: str = "mma"

    def gap(self, target: str, attacker: Attacker) -> Gap:
        words = whole_words(attacker.surrogate.tokenizer, attacker.lexicon)
        if not words:
            raise MissingCapability("mma needs a surrogate whose vocabulary has whole words besides the forbidden ones")
        return gap_of(target, attacker, list(words))

    def size(self, rng: random.Random) -> int:
        return self.tokens

    def search(self, target: str, system: Target, attacker: Attacker, seed: int) -> Attempt:
        gap, prompt, free = self.gap(target, attacker), target, None
        for k in range(system.left):
            rng = random.Random(f"mma/{seed}/{k}/{target}")
            if free is not None:  # a query that found nothing: go on from there, with two tokens drawn anew
                for place in rng.sample(range(self.tokens), min(2, self.tokens)):
                    free = [*free[:place], rng.choice(gap.words), *free[place + 1 :]]
            free = self.optimised(gap, rng, free)
            prompt = gap.filled(free)
            if system.ask(prompt, seed)[1]:
                return attempt(self.name, target, system, prompt, True, gap.objective)
        return attempt(self.name, target, system, prompt, False, gap.objective)

    def optimised(self, gap: Gap, rng: random.Random, start: list[str] | None = None) -> list[str]:
        """The free tokens that came closest to the objective, from the best of some random ones or from `start`."""
        surrogate = gap.objective.surrogate
        number = surrogate.tokenizer.get_vocab()
        ids = [number[f"{word}</w>"] for word in gap.words]
        table = surrogate.encoder.get_input_embeddings().weight.detach()[ids].cpu()
        options = [gap.drawn(self.tokens, rng) for _ in range(self.top)] if start is None else [start]
        free, score, recommended = options[0], float("-inf"), None
        for _ in range(self.rounds + 1):
            scores = gap.objective([gap.filled(words) for words in options])
            if float(scores.max()) > score:
                score, free, recommended = float(scores.max()), options[int(scores.argmax())], None
            if recommended is None:
                grad = self.gradient(gap, [number[f"{word}</w>"] for word in free])
                recommended = (grad @ table.T).argsort(1, descending=True)[:, : 2 * self.top].tolist()
            options = []
            for _ in range(self.top):
                place = rng.randrange(self.tokens)
                word = gap.words[rng.choice(recommended[place])]
                options.append([*free[:place], word, *free[place + 1 :]])
        return free

    def gradient(self, gap: Gap, free: Sequence[int]) -> Float[Tensor, "k d"]:
        """∂ objective / ∂ embedding of every free token; 0 for tokens beyond the encoder's length."""
        objective, surrogate = gap.objective, gap.objective.surrogate
        tokenizer = surrogate.tokenizer
        before, after = (
            tokenizer(text, add_special_tokens=False).input_ids
            for text in (gap.prompt[: gap.span[0]].strip(), gap.prompt[gap.span[1] :].strip())
        )
        inside = [*before, *free, *after][: surrogate.length - 2]
        row = [tokenizer.bos_token_id, *inside, tokenizer.eos_token_id]
        ids: Int[Tensor, "1 l"] = torch.tensor([row + [tokenizer.pad_token_id] * (surrogate.length - len(row))])
        grad = embedding_gradient(objective, ids)
        start, end = 1 + len(before), min(1 + len(before) + len(free), len(row) - 1)
        part = grad[start:end] if start < end else grad[:0]
        return torch.nn.functional.pad(part, (0, 0, 0, len(free) - len(part)))


def embedding_gradient(objective: Objective, ids: Int[Tensor, "1 l"]) -> Float[Tensor, "l d"]:
    """∂ objective / ∂ embedding of every token of one text, on the CPU."""
    surrogate = objective.surrogate
    kept: list[Tensor] = []

    def catch(_module: object, _args: object, out: Tensor) -> Tensor:
        leaf = out.detach().requires_grad_()
        kept.append(leaf)
        return leaf

    hook = surrogate.encoder.get_input_embeddings().register_forward_hook(catch)
    objective.reads += GRADIENT_READS
    ids = ids.to(surrogate.device)
    try:
        with torch.enable_grad():
            states = surrogate.encoder(ids).last_hidden_state
            close = surrogate.pool(states, ids)[0] @ objective.wanted.to(surrogate.device)
            (grad,) = torch.autograd.grad(close, kept[0])
    finally:
        hook.remove()
    return grad[0].cpu()
