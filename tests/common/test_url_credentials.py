"""Removal and parsing of credentials in URLs and texts, percent-encoded or not."""

from __future__ import annotations

import pytest

from components.common.runtime import url_credentials


@pytest.mark.parametrize(
    ("address", "expected"),
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
def test_remove_password(address: str, expected: str) -> None:
    assert url_credentials.remove_password(address) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://ada:s3cret@host:5000/mlflow", "http://host:5000/mlflow"),
        ("http://ada@host:5000", "http://host:5000"),
        ("http://a-token:@host:5000", "http://host:5000"),
        ("http://host:5000/a@b", "http://host:5000/a@b"),
        ("sqlite:////srv/a@b/mlflow.db", "sqlite:////srv/a@b/mlflow.db"),
    ],
)
def test_remove_credentials(address: str, expected: str) -> None:
    assert url_credentials.remove_credentials(address) == expected


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("https://ada:s%40c%2Fret@host/path", ("https://host/path", "ada", "s@c/ret")),
        ("https://ada%40org:s3cret@host", ("https://host", "ada@org", "s3cret")),
        ("https://host:8888", ("https://host:8888", "", "")),
        ("https://[::1]:8888/pipeline", ("https://[::1]:8888/pipeline", "", "")),
    ],
)
def test_split_credentials(address: str, parts: tuple[str, str, str]) -> None:
    assert url_credentials.split_credentials(address) == parts


def test_contains_password_ignores_ports() -> None:
    assert url_credentials.contains_password("see https://ada:s3cret@host/, or ask")
    assert url_credentials.contains_password("http://proxy:3128,http://ada:p/w@host")
    assert not url_credentials.contains_password("http://host:5000/a@b and https://other:443")


def test_mask_credentials_in_text() -> None:
    text = "403 Client Error: Forbidden for url: http://ada:s3/cr@t@host:5000/api, and http://a-token@other, not http://host:5000/a@b"
    assert (
        url_credentials.mask_credentials(text)
        == "403 Client Error: Forbidden for url: http://***@host:5000/api, and http://***@other, not http://host:5000/a@b"
    )
