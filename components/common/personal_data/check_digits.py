"""Check digits of payment cards, books and products."""

from __future__ import annotations


def has_luhn_check_digit(digits: str) -> bool:
    """Return whether the last digit is the check digit of the others (ISO/IEC 7812-1, annex B)."""
    doubled = "0246813579"
    total = sum(int(d) for d in digits[::-2]) + sum(int(doubled[int(d)]) for d in digits[-2::-2])
    return total % 10 == 0


def has_isbn_check_digit(digits: str) -> bool:
    """Return whether ten digits are an ISBN-10 (ISO 2108)."""
    return sum(weight * int(digit) for weight, digit in enumerate(reversed(digits), 1)) % 11 == 0


def has_bar_code_check_digit(digits: str) -> bool:
    """Return whether the last digit is the check digit of a UPC or EAN (ISO/IEC 15420)."""
    return (sum(map(int, digits[::-2])) + 3 * sum(map(int, digits[-2::-2]))) % 10 == 0
