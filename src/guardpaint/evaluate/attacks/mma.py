"""MMA: optimise tokens on a surrogate encoder until the embedding is close to the target's, without forbidden words."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from guardpaint.errors import MissingCapability
from guardpaint.evaluate.attacks.system import Attempt, Target, attempt
from guardpaint.testbed.language import Attacker, Lexicon, Surrogate


@dataclass(frozen=True)
class Mma:
    """Coordinate search guided by the gradient of the similarity with respect to each token's embedding."""

    rounds: int = 12
    tokens: int = 5
    """Free tokens that replace the forbidden words."""
    top: int = 12
    """Replacements tried per token, by gradient."""
    name: str = "mma"

    def search(self, target: str, system: Target, attacker: Attacker, seed: int) -> Attempt:
        prompt = target
        for k in range(system.left):
            prompt = self.optimise(target, attacker, random.Random(f"mma/{seed}/{k}/{target}"))
            if system.ask(prompt, seed)[1]:
                return attempt(self.name, target, system, prompt, True)
        return attempt(self.name, target, system, prompt, False)

    def optimise(self, target: str, attacker: Attacker, rng: random.Random) -> str:
        """The target with its forbidden phrase replaced by the free tokens that came closest to its embedding."""
        surrogate, tokenizer = attacker.surrogate, attacker.surrogate.tokenizer
        asked, forbidden = attacker.lexicon.lone(target)
        span = forbidden or (len(asked), len(asked))
        head, tail = asked[: span[0]].strip(), asked[span[1] :].strip()
        allowed = allowed_tokens(tokenizer, attacker.lexicon)
        want = surrogate.embed([target])[0]
        free = [rng.choice(allowed) for _ in range(self.tokens)]
        pieces = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
        before, after = pieces(head), pieces(tail)

        def prompts(options: list[list[int]]) -> list[str]:
            return [" ".join(f"{head} {tokenizer.decode(o)} {tail}".split()) for o in options]

        score = float(surrogate.embed(prompts([free]))[0] @ want)
        for _ in range(self.rounds):
            grad = self.gradient(before, free, after, want, surrogate)
            place = rng.randrange(self.tokens)
            table = surrogate.encoder.get_input_embeddings().weight.detach().cpu()
            ranking = (table[allowed] @ grad[place]).argsort(descending=True)[: self.top].tolist()
            options = [[*free[:place], allowed[r], *free[place + 1 :]] for r in ranking]
            scores = surrogate.embed(prompts(options)) @ want
            if float(scores.max()) > score:
                score, free = float(scores.max()), options[int(scores.argmax())]
        return prompts([free])[0]

    def gradient(
        self, before: list[int], free: list[int], after: list[int], want: Float[Tensor, " d"], surrogate: Surrogate
    ) -> Float[Tensor, "k d"]:
        """∂ similarity / ∂ embedding of every free token."""
        tokenizer = surrogate.tokenizer
        row = [tokenizer.bos_token_id, *before, *free, *after, tokenizer.eos_token_id][: surrogate.length]
        ids: Int[Tensor, "1 l"] = torch.tensor([row + [tokenizer.pad_token_id] * (surrogate.length - len(row))])
        ids, want = ids.to(surrogate.device), want.to(surrogate.device)
        layer = surrogate.encoder.get_input_embeddings()
        kept: list[Tensor] = []

        def catch(_module: object, _args: object, out: Tensor) -> Tensor:
            leaf = out.detach().requires_grad_()
            kept.append(leaf)
            return leaf

        hook = layer.register_forward_hook(catch)
        try:
            with torch.enable_grad():
                states = surrogate.encoder(ids).last_hidden_state
                close = surrogate.pool(states, ids)[0] @ want
                (grad,) = torch.autograd.grad(close, kept[0])
        finally:
            hook.remove()
        start = 1 + len(before)
        part = grad[0, start : start + len(free)].cpu()
        return torch.nn.functional.pad(part, (0, 0, 0, len(free) - len(part)))


def allowed_tokens(tokenizer: Any, lexicon: Lexicon) -> list[int]:
    """Whole-word tokens that neither contain a forbidden word nor are part of one."""
    vocab: dict[str, int] = tokenizer.get_vocab()
    whole = {index: token.removesuffix("</w>") for token, index in vocab.items() if token.endswith("</w>")}
    words = {index: word for index, word in whole.items() if word.isalpha() and len(word) > 1}
    allowed = sorted(i for i, word in words.items() if not any(word in k or k in word for k in lexicon.keywords))
    if not allowed:
        raise MissingCapability("mma needs a surrogate whose vocabulary has whole words besides the forbidden ones")
    return allowed
