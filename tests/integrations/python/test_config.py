"""Arguments override environment variables, which override defaults. A typo is an error."""

import re

import numpy
import pytest
import thinwire
import thinwire.torch
from thinwire import config


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", *config.VARIABLES):
        monkeypatch.delenv(name, raising=False)


def test_the_first_of_gloos_interfaces_counts(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8,eth9")
    assert config.resolve().interface == "eth8"


@pytest.mark.parametrize("variable, text, words", [
    ("THINWIRE_IFACE", "lo,eth0", "the name of one network interface"),
    ("THINWIRE_LANES", "65", "1 to 64"),
    ("THINWIRE_CHUNK_BYTES", "10", "from 4096"),
])  # fmt: skip
def test_the_message_says_what_a_value_may_be(monkeypatch, variable, text, words):
    monkeypatch.setenv(variable, text)
    with pytest.raises(thinwire.InvalidArgumentError, match=words):
        config.resolve()


def test_what_a_machine_lacks_is_named(tmp_path):
    config.check_here(config.Config(interface="lo", trace=str(tmp_path / "t.json"), flight="f.txt"))
    with pytest.raises(thinwire.InvalidArgumentError, match=r"'nope0' here, only .*\blo\b"):
        config.check_here(config.Config(interface="nope0"))
    for name in ("trace", "flight"):
        with pytest.raises(thinwire.InvalidArgumentError, match=f"{name} .*folder"):
            config.check_here(config.Config(**{name: str(tmp_path / "nowhere" / "file")}))


def test_a_warning_points_at_the_users_file(monkeypatch):
    monkeypatch.setenv("THINWIRE_CODECS", "int8")
    with pytest.warns(UserWarning, match="THINWIRE_CODECS") as caught:
        thinwire.torch.GradientExchange("topk:density=0.005", min_bytes=0)
    assert len(caught) == 2
    assert {warning.filename for warning in caught} == {__file__}


def test_our_interface_goes_before_gloos(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    monkeypatch.setenv("THINWIRE_IFACE", "eth7")
    assert config.resolve().interface == "eth7"


def test_an_unknown_name_warns_and_names_the_nearest(monkeypatch):
    monkeypatch.setenv("THINWIRE_CODECS", "int8")
    with pytest.warns(UserWarning, match="THINWIRE_CODECS.*THINWIRE_CODEC"):
        config.resolve()


@pytest.mark.parametrize("variable, text", [
    ("THINWIRE_LANES", "many"), ("THINWIRE_LANES", "-1"), ("THINWIRE_LANES", "0"),
    ("THINWIRE_TIMEOUT_S", "soon"), ("THINWIRE_TIMEOUT_S", "nan"), ("THINWIRE_TIMEOUT_S", "inf"),
    ("THINWIRE_CHUNK_BYTES", "4M"), ("THINWIRE_LOG", "loud"), ("THINWIRE_LANES", " "),
    ("THINWIRE_LANES", "9" * 400), ("THINWIRE_TIMEOUT_S", "9" * 400), ("THINWIRE_STRICT", "yes"),
    ("THINWIRE_TOPOLOGY", " flat"), ("THINWIRE_CODEC", "\udc80"), ("THINWIRE_TRACE", "\udc80"),
    ("THINWIRE_KEY_FILE", "\udc80"), ("THINWIRE_CONGESTION", "\udc80"),
])  # fmt: skip
def test_a_value_that_can_not_be_is_refused(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(thinwire.InvalidArgumentError) as raised:
        config.resolve()
    assert re.match(f"{variable} is .*, expected ", str(raised.value), re.DOTALL)
    assert repr(text)[:10] in str(raised.value)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("name", ["trace", "flight"])
@pytest.mark.parametrize("path", ["/", ".", ".."])
def test_a_file_without_a_name_is_refused(name, path):
    with pytest.raises(thinwire.InvalidArgumentError, match=f"{name} is .*expected the name of a"):
        config.check_here(config.resolve(**{name: path}))


def test_a_key_file_is_the_environments_alone(monkeypatch):
    monkeypatch.setenv("THINWIRE_KEY_FILE", "/etc/key")
    assert config.resolve().key_file == "/etc/key"
    with pytest.raises(TypeError, match="key_file"):
        config.resolve(key_file="/etc/key")


@pytest.mark.parametrize("setting", [
    {"lanes": 0}, {"timeout_s": 0}, {"chunk_bytes": -4}, {"min_bytes": -1}, {"lanes": "4"},
    {"planned": 1}, {"timeout_s": 10**400 * -1}, {"trace": "\udc80"}, {"lanes": 10**400},
])  # fmt: skip
def test_a_bad_argument_is_refused(setting):
    with pytest.raises(thinwire.InvalidArgumentError, match=next(iter(setting))):
        config.resolve(**setting)


def test_numpys_integers_become_pythons():
    found = config.resolve(lanes=numpy.int64(3), timeout_s=numpy.int32(9))
    assert [type(value) for value in (found.lanes, found.timeout_s)] == [int, int]
