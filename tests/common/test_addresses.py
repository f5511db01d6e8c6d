"""An address may hold a user and a password, escaped or not; what is shown of it has no password."""

from __future__ import annotations

import pytest

from components.common import addresses


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://ada:s3cret@host:5000/mlflow", "http://ada@host:5000/mlflow"),
        ("postgresql+psycopg2://u:p@ss@db/mlflow", "postgresql+psycopg2://u@db/mlflow"),
        ("http://ada:s3/cr#t@host", "http://ada@host"),
        ("http://:s3cret@host", "http://host"),
        ("ada:s3cret@host:5000", "ada@host:5000"),
        ("http://ada@host:5000", "http://ada@host:5000"),
        ("http://host:5000", "http://host:5000"),
        ("host:5000/a@b", "host:5000/a@b"),
        ("sqlite:////srv/a@b/mlflow.db", "sqlite:////srv/a@b/mlflow.db"),
    ],
)
def test_an_address_is_shown_and_kept_without_its_password(address: str, shown: str) -> None:
    assert addresses.without_password(address) == shown


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("http://ada:s3cret@host:5000/mlflow", "http://host:5000/mlflow"),
        ("http://ada@host:5000", "http://host:5000"),
        ("http://a-token:@host:5000", "http://host:5000"),
        ("http://host:5000/a@b", "http://host:5000/a@b"),
        ("sqlite:////srv/a@b/mlflow.db", "sqlite:////srv/a@b/mlflow.db"),
    ],
)
def test_a_server_is_asked_at_an_address_without_user_and_password(address: str, asked: str) -> None:
    assert addresses.without_user(address) == asked


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("https://ada:s%40c%2Fret@host/path", ("https://host/path", "ada", "s@c/ret")),
        ("https://ada%40org:s3cret@host", ("https://host", "ada@org", "s3cret")),
        ("https://host:8888", ("https://host:8888", "", "")),
        ("https://[::1]:8888/pipeline", ("https://[::1]:8888/pipeline", "", "")),
    ],
)
def test_an_address_is_split_into_server_user_and_password(address: str, parts: tuple[str, str, str]) -> None:
    assert addresses.split(address) == parts


def test_a_password_is_found_anywhere_in_a_text_and_a_port_is_none() -> None:
    assert addresses.holds_password("see https://ada:s3cret@host/, or ask")
    assert addresses.holds_password("http://proxy:3128,http://ada:p/w@host")
    assert not addresses.holds_password("http://host:5000/a@b and https://other:443")


def test_a_text_is_told_without_the_users_and_passwords_of_its_addresses() -> None:
    said = "403 Client Error: Forbidden for url: http://ada:s3/cr@t@host:5000/api, and http://a-token@other, not http://host:5000/a@b"
    assert (
        addresses.masked(said)
        == "403 Client Error: Forbidden for url: http://***@host:5000/api, and http://***@other, not http://host:5000/a@b"
    )
