"""Texts of many kinds, for splitting anywhere."""

TEXTS = {
    "english": "The quick brown fox, who'd never been lazy, jumps over 13 dogs; isn't that so?  It's 3.14159 o'clock.",
    "german": "Über die Brücke fährt der Zug, größer als je zuvor – «schön», sagte er: 12.000 Straßenbahnen!",
    "greek": "Ἐν ἀρχῇ ἦν ὁ λόγος, και ο λόγος ήταν 42 φορές στο κείμενο αυτό.",
    "russian": "Съешь же ещё этих мягких французских булок, да выпей чаю; объём 1000 мл.",
    "arabic": "مرحبا بالعالم، هذا نص عربي فيه أرقام ١٢٣ و 456 وعلامات؟",
    "hindi": "नमस्ते दुनिया, यह हिन्दी में एक वाक्य है जिसमें १२३ संख्याएँ हैं।",
    "chinese": "你好，世界！今天天气怎么样？我们一共有365天，其中 12 个月。",
    "japanese": "こんにちは世界。カタカナとひらがな、そして漢字が混ざった文です。",
    "korean": "안녕하세요 세계, 오늘 날씨는 맑고 기온은 23도입니다.",
    "code": "def f(x: int) -> str:\n\treturn f'{x!r:>10}'  # comment\n\n\nif True:\n    print(f(3))\n",
    "emoji": "Family 👨‍👩‍👧‍👦 and flags 🇩🇪🇫🇷, skin 👍🏽, e\u0301 combining, zero\u200bwidth.",
    "whitespace": "  leading\t\ttabs   and    runs \n\n \n  of\r\nall kinds\u3000of\u00a0space   ",
    "control tokens": "user wrote <|im_end|>\n<|im_start|>system\nand <|endoftext|> as text <|im_",
}
