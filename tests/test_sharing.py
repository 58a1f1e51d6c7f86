"""A guard goes to the hub as a folder with a card, and comes back the same."""

from __future__ import annotations

import shutil

import pytest
import yaml

from guardpaint.errors import BadConfig, GuardPaintError
from guardpaint.guard import GuardPaint
from guardpaint.testing import small


class LocalHub:
    """Keeps what is uploaded in a folder, with the signatures of `huggingface_hub.HfApi`."""

    def __init__(self, place, fails=False):
        self.place, self.fails, self.created = place, fails, []

    def create_repo(self, repo_id, *, private, exist_ok):
        self.created.append((repo_id, private, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, commit_message, revision):
        if self.fails:
            raise ConnectionError("403: this token may not write")
        shutil.copytree(folder_path, self.place / repo_id)


def test_the_stand_in_has_the_signatures_of_the_real_client():
    import inspect

    from huggingface_hub import HfApi

    for name in ("create_repo", "upload_folder"):
        real = inspect.signature(getattr(HfApi, name)).parameters
        assert set(inspect.signature(getattr(LocalHub, name)).parameters) <= set(real)


def test_what_is_uploaded_is_the_guard_and_a_card_that_names_it(tmp_path):
    guard, hub = small.guard(), LocalHub(tmp_path)
    name = guard.push_to_hub(
        "owner/guard", {"license": "apache-2.0", "metrics": {"recall": 0.9}}, hub=hub, revision="v1"
    )
    assert name == "hub:owner/guard@v1" and hub.created == [("owner/guard", True, True)]
    again = GuardPaint.from_pretrained(tmp_path / "owner" / "guard")
    assert again.weight_hashes() == guard.weight_hashes()
    text = (tmp_path / "owner" / "guard" / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "apache-2.0" and front["library_name"] == "guardpaint" and "safety" in front["tags"]
    assert front["policy"]["categories"] == list(guard.policy.names) and front["metrics"][0]["value"] == 0.9
    assert "calibration is missing" in text and "| auditor | auditor-scorer | auditor |" in text


def test_without_a_licence_or_the_right_to_write_nothing_is_uploaded(tmp_path):
    with pytest.raises(BadConfig, match="licence"):
        small.guard().push_to_hub("owner/guard", {}, hub=LocalHub(tmp_path))
    with pytest.raises(GuardPaintError, match="may not write"):
        small.guard().push_to_hub("owner/guard", {"license": "mit"}, hub=LocalHub(tmp_path, fails=True))
    assert not list(tmp_path.iterdir())
