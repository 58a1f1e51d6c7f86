"""Shapes in signatures are checked here as in the product's tests."""

from __future__ import annotations

from jaxtyping import install_import_hook

install_import_hook(["guardpaint", "paperdolls"], "typecheck.checked")

import torch  # noqa: E402

torch.set_num_threads(1)
