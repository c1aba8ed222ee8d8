"""Makes tests/golden/tokens.json: what llama.cpp makes of a corpus of difficult texts.

    python scripts/make_golden_tokens.py MODEL.gguf [--out tests/golden/tokens.json]

Needs llama-cpp-python. Each case has the text, its ids with control tokens taken as text (`plain`) and its ids
with control tokens parsed (`special`), both without BOS; and for short texts the plain ids that the same
vocabulary gives under other pre-tokenizers, where these differ (`others`). A test compares our ids with them.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import llama_cpp

PROSE = [
    "",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "It's what they've said: I'm sure we'll see that you'd agree, won't you? THEY'LL, I'M, DON'T.",
    "‘Curly’ “quotes” don’t behave like 'straight' \"ones\" – nor do dashes — or ellipses…",
    "naïve café déjà vu façade coöperate Zürich São Paulo Łódź Kraków",
    "Fünf Füchse fraßen früh größere Äpfel; Übermut tut selten gut.",
    "Où est passé l'œuf de ma sœur ? Là-bas, près du cœur de la forêt.",
    "¿Dónde está el niño? ¡En el jardín, con el pingüino!",
    "Þetta reddast, sagði hún og hló í kuldanum.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Zażółć gęślą jaźń.",
    "Árvíztűrő tükörfúrógép.",
    "İstanbul'da ışıklar söndü, ığdır'da yağmur yağıyor.",
    "Tiếng Việt có nhiều dấu: ở, ế, ữ, ặ, ợ.",
    "Cafe\u0301 with a combining accent, and n\u0303 too.",
    "Z̷͍̈a̶̰͝l̵̦̀g̴͎͗o̸̘̾ stacks many marks.",
]

SCRIPTS = [
    "Η θάλασσα είναι ήρεμη σήμερα το πρωί.",
    "Ἐν ἀρχῇ ἦν ὁ λόγος, καὶ ὁ λόγος ἦν σαφής.",
    "Сегодня утром шёл снег, и город притих.",
    "Її їжак їсть ґрунтові ягоди з об'їждженого поля.",
    "Ђак је љуто чекао њену џеп-свеску.",
    "Би өнөөдөр номын сан руу явна.",
    "السماء صافية والبحر هادئ هذا الصباح.",
    "كَتَبَ الوَلَدُ رِسالَةً طَويلَةً إلى جَدَّتِهِ.",
    "امروز هوا خوب است و می‌خواهم پیاده‌روی کنم.",
    "آج موسم بہت اچھا ہے، چلو باہر چلتے ہیں۔",
    "הים שקט הבוקר, והשמיים כחולים.",
    "שָׁלוֹם עֲלֵיכֶם, אָמַר הָאִישׁ.",
    "आज सुबह बारिश हुई और बच्चे खेलने निकले।",
    "আজ সকালে বৃষ্টি হয়েছে, তাই রাস্তা ভেজা।",
    "ਅੱਜ ਸਵੇਰੇ ਮੀਂਹ ਪਿਆ ਸੀ।",
    "આજે સવારે વરસાદ પડ્યો.",
    "இன்று காலை மழை பெய்தது, குழந்தைகள் விளையாடினர்.",
    "ఈ ఉదయం వర్షం కురిసింది.",
    "ಇಂದು ಬೆಳಿಗ್ಗೆ ಮಳೆ ಬಂತು.",
    "ഇന്ന് രാവിലെ മഴ പെയ്തു.",
    "අද උදේ වැස්සා.",
    "เช้านี้ฝนตกและถนนเปียกมาก",
    "ເຊົ້ານີ້ຝົນຕົກ",
    "ព្រឹកនេះមានភ្លៀង",
    "ဒီမနက် မိုးရွာတယ်။",
    "བོད་སྐད་ནི་སྐད་ཡིག་ཅིག་ཡིན།",
    "今天早上下雨了,街道都湿了。",
    "繁體字與簡体字混在一起,還有「引號」和、頓號。",
    "今朝は雨が降って、道がぬれています。カタカナもひらがなも。",
    "ﾊﾝｶｸ ｶﾀｶﾅ と ＦＵＬＬ　ＷＩＤＴＨ １２３",
    "오늘 아침에 비가 와서 길이 젖었어요.",
    "한글 자모",
    "Այս առավոտ անձրև եկավ։",
    "დღეს დილით წვიმდა.",
    "ዛሬ ጠዋት ዝናብ ዘነበ።",
    "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ",
    "ᐃᓄᒃᑎᑐᑦ",
    "ⵜⴰⵎⴰⵣⵉⵖⵜ",
    "𐌰𐌱𐌲 𝔊𝔬𝔱𝔥𝔦𝔠 𝒮𝒸𝓇𝒾𝓅𝓉 𝟙𝟚𝟛",
    "𓀀𓁐𓂀 and 𒀀𒁀",
    "mixed: abcДЕЖ漢字かな한글عربىעברית123",
]

CODE = [
    "def greet(name: str) -> str:\n    return f\"Hello, {name}!\"\n\n\nprint(greet('you'))\n",
    "class Tree:\n\tdef __init__(self):\n\t\tself.left = self.right = None\n",
    "for (int i = 0; i < 10; ++i) { std::cout << a[i] << '\\n'; }",
    "#include <vector>\ntemplate <class T> T sum(const std::vector<T>& v) {\n  T s{};\n  return s;\n}\n",
    'fn main() -> Result<(), Box<dyn Error>> {\n    let x: &\'static str = "hi";\n    Ok(())\n}',
    "const add = (a, b) => a + b; // adds\nconsole.log(`sum: ${add(1, 2)}`);",
    "func (s *Server) Run(ctx context.Context) error {\n\tif err := s.listen(); err != nil {\n\t\treturn err\n\t}\n}",
    "SELECT name, COUNT(*) AS n FROM users WHERE age >= 21 GROUP BY name ORDER BY n DESC;",
    '{"key": [1, 2.5, -3e10, true, null], "nested": {"a": "b\\u00e9"}}',
    '<html>\n  <body class="main">\n    <p>Text &amp; more</p>\n  </body>\n</html>',
    "key: value\nlist:\n  - one\n  - two: 2\n",
    "#!/bin/sh\nset -eu\nfor f in *.txt; do wc -l \"$f\" | awk '{print $1}'; done\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "# Title\n\n* item **bold** _em_ `code`\n\n```python\nx = 1\n```\n",
    "map f (x:xs) = f x : map f xs",
    "(defun square (x) (* x x))",
    "\\frac{a^2 + b^2}{\\sqrt{c}} \\leq \\sum_{i=0}^{n} x_i",
    "x = [i**2 for i in range(10) if i % 2 == 0]  # squares",
    "https://example.org/path/to?q=a+b&lang=en#part-2 and user.name@example.com",
    "C:\\Users\\me\\file.txt ../../etc/conf.d ~/.config",
    "^(?:[a-z0-9]+\\.)*[a-z]{2,}$",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "0x1F 0b1010 1_000_000 6.02e23 1.0f",
    "a=b+c;d-=e*f/g%h;i=!j&&k||l?m:n",
]

EMOJI = [
    "🙂",
    "👍🏻👍🏽👍🏿",
    "👩‍👩‍👧‍👦 family, 👨🏾‍💻 at work, 🏳️‍🌈 flag",
    "🇫🇷🇯🇵🇧🇷",
    "❤️ ❤ ☺️ ☺ 1️⃣ #️⃣",
    "🙂🙃🙂🙃🙂",
    "text🙂text 🙂 text",
    "🫠🪿🩷",
    "⌨️→⇒∀∃∈≤≥≠±×÷√∞∑∫",
    "♠♥♦♣ ★☆ ✓✗ ☃",
]

WHITESPACE = [
    " ",
    "  ",
    "   ",
    "    ",
    "        ",
    " " * 17,
    " " * 100,
    "\n",
    "\n\n",
    "\n\n\n\n\n",
    "\t",
    "\t\t\t",
    "\r\n",
    "\r\n\r\n",
    "\r",
    " \n \n ",
    "a b",
    "a  b",
    "a   b",
    " a",
    "  a",
    "a ",
    "a  ",
    "a\nb",
    "a\n\nb",
    "a \nb",
    "a\n b",
    "a\n  b",
    "a\tb",
    "a\t b",
    "a \tb",
    "a\r\nb\r\n",
    "a\u00a0b",
    "\u00a0\u00a0a",
    "a\u3000b\u3000\u3000c",
    "a\u2003b\u2009c\u200ad",
    "a\u2028b\u2029c\u0085d",
    "a\u200bb\u200cc\u200dd\u2060e\ufefff",
    "a\x0bb\x0cc",
    "  leading and trailing  ",
    "tabs\tand  spaces \t mixed \n with lines\n\n\t",
    "1 2  3   4",
    "! !  !   !",
]

DIGITS_AND_PUNCTUATION = [
    "0",
    "12345678901234567890",
    "3.14159, 2,718,281.8 and -40°C",
    "2024-02-29T23:59:60Z",
    "1st 2nd 3rd 4th x2 2x a1b2c3",
    "١٢٣٤٥ १२३४५ 一二三 Ⅳ ⅷ ½ ¾ ² ₃ ①②",
    "$1,299.99 €50 £20 ¥3000 ₹100 ₿1",
    "50% off!!! Really?!?!",
    "...",
    "--- ___ *** === ~~~ ###",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "((([[[{{{}}}]]])))",
    "a.b,c;d:e!f?g",
    "'' \"\" `` ´´",
    "«guillemets» „low“ ‚single‘ 「corner」 【lens】",
    "'s 't 're 've 'm 'll 'd 'x",
    "'S 'T 'RE 'VE 'M 'LL 'D 'X",
    " 's a's 's' ''s",
    "-1 +1 ±1 1-1 1--1",
    "(555) 123-4567",
]

CONTROL_CHARACTERS = [
    "\x00",
    "a\x00b",
    "!\x04!",
    "!\x00!\x01!\x02!\x03!\x04!\x05!\x06!\x07!",
    "\x01\x02\x03",
    "\x1b[31mred\x1b[0m",
    "bell\x07 backspace\x08 delete\x7f",
    "".join(map(chr, range(32))),
    "\x80\x81\x9f\xad",
    "\u202eright to left\u202c \u2066isolated\u2069",
    "\ufffd\ufffe\uffff",
    "\ue000\uf8ff\U000f0000\U0010ffff",
    "\U00010d40\U000116d0 new digits",
    "a\U000e0041\U000e007fb",
]

SPECIAL_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|>",
    "a<|im_end|>b",
    "a <|im_end|> b",
    "  <|im_end|>  ",
    "\n<|im_end|>\n\n<|im_start|>",
    "<|im_end",
    "im_end|>",
    "<|im_end|",
    "< |im_end|>",
    "<<|im_end|>>",
    "<|im_<|im_end|>end|>",
    "<|IM_END|>",
    "<|im_end|>1<|im_end|>2",
    "<repo_name>x<reponame>y<file_sep>z<filename>",
    "<jupyter_start><jupyter_text>a<jupyter_code>b<jupyter_output>c<jupyter_script><empty_output>",
    "<gh_stars>100<issue_start><issue_comment>text<issue_closed>",
    "<s>not</s> <unk> <pad> [INST] special <|eot_id|> here",
    "don't<|im_end|>'t",
    "漢<|im_start|>字",
    '<|im_start|>system\nYou say "<|im_end|>" often.<|im_end|>',
]

LONG = [
    "a" * 300,
    "ab" * 200,
    "aaaa " * 60,
    "ha" * 150 + "!",
    "Z" * 257,
    "0" * 64,
    "=" * 120,
    "-" * 79 + "\n",
    "!?" * 100,
    "\n" * 50,
    "\t" * 40,
    "é" * 100,
    "漢" * 60,
    "🙂" * 40,
    "ไ" * 50,
    "the " * 100,
    " the" * 100,
    "Pneumonoultramicroscopicsilicovolcanoconiosis Donaudampfschifffahrtsgesellschaft",
    "word,word;word:word." * 20,
    "".join(chr(c) for c in range(0x20, 0x180)),
    " ".join(chr(c) for c in range(0x370, 0x400)),
    "".join(chr(c) for c in range(0x2000, 0x2070)),
    "".join(f"{i}, " for i in range(100)),
]

CORPUS = [
    *PROSE,
    *SCRIPTS,
    *CODE,
    *EMOJI,
    *WHITESPACE,
    *DIGITS_AND_PUNCTUATION,
    *CONTROL_CHARACTERS,
    *SPECIAL_TOKENS,
    *LONG,
]


OTHER_PRE_TOKENIZERS = ["dbrx", "default", "gpt-2", "llama-bpe", "qwen2"]
SHORT = 150
"""Characters of a text that is tried with the other pre-tokenizers as well."""


def cases(path: Path) -> Iterator[dict[str, object]]:
    model = load(path)
    others = {name: load(path, name) for name in OTHER_PRE_TOKENIZERS}
    for text in CORPUS:
        encoded = text.encode()
        plain = model.tokenize(encoded, add_bos=False, special=False)
        by_name = {
            name: other.tokenize(encoded, add_bos=False, special=False)
            for name, other in others.items()
            if len(text) <= SHORT
        }
        yield {
            "text": text,
            "plain": plain,
            "special": model.tokenize(encoded, add_bos=False, special=True),
            "others": {name: ids for name, ids in by_name.items() if ids != plain},
        }


def load(path: Path, pre_tokenizer: str | None = None) -> llama_cpp.Llama:
    overrides = None if pre_tokenizer is None else {"tokenizer.ggml.pre": pre_tokenizer}
    return llama_cpp.Llama(str(path), vocab_only=True, verbose=False, kv_overrides=overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden token ids.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("tests/golden/tokens.json"))
    arguments = parser.parse_args()
    assert len(set(CORPUS)) == len(CORPUS), "a text is there twice"
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases(arguments.model))
    head = {
        "source": f"llama-cpp-python {llama_cpp.__version__}",
        "model": arguments.model.name,
        "other_pre_tokenizers": OTHER_PRE_TOKENIZERS,
        "short": SHORT,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(f'{json.dumps(head)[:-1]}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
