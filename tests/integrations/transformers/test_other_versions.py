"""Versions of transformers that make weights in another way are noticed, and load all the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from transformers import core_model_loading

from cxl_offload.integrations.transformers.in_place import made_in_place


class Places:
    """Places that nobody asks."""

    def empty(self, *_: Any) -> None:
        return None

    def place_layer(self, _: Any) -> None:
        return None


def test_a_converter_with_other_parameters_is_left_alone_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def convert(self: Any, name: str, somewhere: Any) -> None:
        raise AssertionError("nobody converts here")

    monkeypatch.setattr(core_model_loading.WeightConverter, "convert", convert)
    with caplog.at_level(logging.WARNING), made_in_place(Places()):
        assert core_model_loading.WeightConverter.convert is convert
    assert "WeightConverter.convert(self, layer_name" in caplog.text


def test_the_converter_of_this_version_is_known_and_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stock = core_model_loading.WeightConverter.convert
    with caplog.at_level(logging.WARNING), made_in_place(Places()):
        assert core_model_loading.WeightConverter.convert is not stock
    assert core_model_loading.WeightConverter.convert is stock
    assert not caplog.text
