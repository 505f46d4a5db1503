"""A layer's profile as a file, its key, and the folder that keeps profiles between runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from memo.artifacts.layer_profile import LayerProfile, ProfileKey
from memo.artifacts.profile_cache import cache_file
from memo.errors import ArtifactError

KEY = ProfileKey(
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=14336,
    normalization="RMSNorm",
    activation="swiglu",
    position_embedding_type="rope",
    add_bias_linear=False,
    add_qkv_bias=False,
    qk_layernorm=False,
    seq_length=65536,
    micro_batch_size=1,
    tensor_model_parallel_size=4,
    context_parallel_size=2,
    cp_comm_type="p2p",
    cp_a2a_size=1,
    params_dtype="bf16",
    offload_tiles=8,
    attention_backend="auto",
    kernels="torch",
    device="a processor",
    num_threads=2,
    ranks_per_node=8,
    torch="2.13.0",
    memo="0.1.0",
)
PROFILE = LayerProfile(
    key=KEY,
    measured_at="2026-01-31T12:34:56+01:00",
    tensor_bytes={"input": 1 << 26, "qkv": 3 << 25},
    forward_s=0.1 + 0.2,  # not a short decimal
    backward_s=1 / 3,
    recompute_s={"qkv": 1e-3, "fc1": 2e-3},
    offload_bytes_per_s=2.1e10,
    prefetch_bytes_per_s=2.2e10,
    offload_under_compute_bytes_per_s=0.0,
    prefetch_under_compute_bytes_per_s=1.9e10,
)


def test_a_file_gives_back_every_bit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    PROFILE.save(path)
    assert LayerProfile.load(path) == PROFILE
    body = json.loads(path.read_text())
    assert (body["schema"], body["version"]) == ("layer_profile", 1)
    assert PROFILE.measured_on == "2026-01-31 12:34"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"forward_s": 0}, "forward_s is 0: give a number above 0, or "),
    ({"backward_s": -1.0}, r"backward_s is -1\.0: give a number above 0"),
    (
        {"prefetch_under_compute_bytes_per_s": -1.0},
        r"prefetch_under_compute_bytes_per_s is -1\.0: give a number of 0 or more, or ",
    ),
    ({"recompute_s": {"qkv": -0.1}}, r"recompute_s\['qkv'\] is -0\.1: give a number of 0 or more"),
    ({"tensor_bytes": {"input": -4}}, r"tensor_bytes\['input'\] is -4"),
    ({"measured_at": "yesterday"}, "measured_at is 'yesterday': give a string with a date"),
]


@pytest.mark.parametrize(("change", "says"), WRONG)
def test_what_is_no_profile_is_refused_by_field(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ArtifactError, match=rf"profile\.json: {says}.*run `memo profile` again$"):
        LayerProfile.load(path)


def test_every_field_of_a_key_counts() -> None:
    changed: dict[type, Any] = {str: "other", int: 77, bool: True}
    keys = [dataclasses.replace(KEY, **{f.name: changed[f.type]}) for f in dataclasses.fields(KEY)]  # type: ignore[index]
    assert len({key.digest for key in [KEY, *keys]}) == len(keys) + 1
    for field, key in zip(dataclasses.fields(KEY), keys, strict=True):
        there, here = (getattr(each, field.name) for each in (KEY, key))
        assert KEY.differences(key) == f"{field.name} is {there!r} there and {here!r} here"
    assert dataclasses.replace(KEY).digest == KEY.digest and not KEY.differences(dataclasses.replace(KEY))


def test_where_profiles_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{KEY.digest}.json"
    assert cache_file("off", KEY) is None
    assert cache_file(str(tmp_path / "a"), KEY) == tmp_path / "a" / name
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file("~/b", KEY) == tmp_path / "b" / name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_file("auto", KEY) == tmp_path / "xdg" / "memo" / "layer_profiles" / name
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_file("auto", KEY) == tmp_path / ".cache" / "memo" / "layer_profiles" / name
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/no/path")
    with pytest.warns(UserWarning, match=r"^XDG_CACHE_HOME is 'relative/is/no/path', a relative path, which is ign"):
        assert cache_file("auto", KEY) == tmp_path / ".cache" / "memo" / "layer_profiles" / name


def test_a_user_without_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr("memo.artifacts.cache_folder.Path.home", no_home)
    assert cache_file("auto", KEY) is None
