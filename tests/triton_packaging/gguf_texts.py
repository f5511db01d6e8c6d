"""Texts whose tokens distinguish tokenizers: digits, contractions, whitespace, scripts, code, markup and random characters."""

from __future__ import annotations

import random

SAMPLES = (
    "Hello world",
    " leading",
    "trailing ",
    "two  spaces",
    "   three",
    "\t\ttabs\tin line",
    "line\nbreak",
    "\n\n\nblank\n \n lines ",
    "\r\nwindows\r\n",
    "I'm sure they've said it's OK, we'll see, you're, I'd",
    "I'M SURE THEY'VE SAID IT'S",
    "'S 'Re don’t ''' '' \"\"",
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000",
    "x1y22z333",
    "٣٤٥ ١٢٣ ２０２６ ½ ²³ Ⅷ",
    "naïve café Zoë Ångström",
    "Grüße aus Köln, straße",
    "Привет, как дела? нещо на Български",
    "Γειά σου Κόσμε",
    "你好，世界。我想在apple工作1314151天～",
    "こんにちは世界、カタカナ",
    "안녕하세요 세계",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "កាន់តែពិសេសអាច",
    "สวัสดีชาวโลก",
    "🚀 (normal) 😶\u200d🌫️ ✅ 🦙🦙 👩\u200d👩\u200d👧",
    "e\u0301 combining n\u0303",
    "\u00a0no-break\u2003em\u3000ideographic",
    "zero\u200bwidth\ufeff",
    'def f(x: int) -> str:\n    return f"{x!r}"  # comment\n',
    "for (int i=0;i<10;++i){a[i]+=b;}",
    "SELECT * FROM t WHERE id='7' AND name != 'O''Brien';",
    '<html><body class="a">&nbsp;</body></html>',
    '{"key": [1, 2.5, null, true]}',
    "https://example.org/a?b=c&d=%20e#f",
    "user.name+tag@example.co.uk",
    "C:\\Users\\ann\\file.txt",
    "------======= ......!!!!!!?????? ```````",
    "camelCaseWords snake_case_words SCREAMING_CASE kebab-case",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b",
    "<|im_start|> <|im_end|>",
    "$\\frac{a}{b} \\leq \\sum_{i=1}^{n} x_i^2$",
    "ALL CAPS and Title Case",
    "end with newline\n",
    "\n",
    " ",
    "x",
    "½a²b",
    "ǅ ǈ titlecase",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
    "a\u0000b",
    "tab\tnew\nline\rreturn\x0bvertical\x0cform",
)
ALPHABET = "aZé9 \n\t'.,-_/#<>|ßДλ中あ한עع🦙½٣ \u00a0\u200dxQ0"


def _draw(generator: random.Random) -> str:
    return "".join(generator.choice(ALPHABET) for _ in range(generator.randint(1, 40)))


def build_texts(count: int = 200) -> list[str]:
    """Return the samples and random texts."""
    generator = random.Random(0)
    return [*SAMPLES, *(_draw(generator) for _ in range(count - len(SAMPLES)))]


TEXTS = build_texts()
