"""Answers keep whole characters as readers see them: in each script, the gold pieces give the gold text."""

import unicodedata

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import text_of_pieces
from megatron_ddrp.tasks.finetune.kinds.tokens import Answers
from megatron_ddrp.tasks.finetune.table_files import Example, Task
from tests.unit.tasks.finetune.tiny_encoder import SPECIAL

SENTENCES = {
    "Latin": "le café où naïveté Đặng Thị Ngọc",
    "Greek": "Όλοι οι άνθρωποι γεννιούνται ἐλεύθεροι",
    "Cyrillic": "Все люди рождаются ещё свободными й",
    "Armenian": "Բոլոր մարդիկ ծնվում են ազատ",
    "Hebrew": "בְּרֵאשִׁית בָּרָא אֱלֹהִים",
    "Arabic": "يُولَدُ جَمِيعُ النَّاسِ أَحْرَارًا",
    "Persian": "می‌خواهم کتاب‌ها را بخوانم",
    "Syriac": "ܟܠ ܒܪܢܫܐ ܒܪܝܠܗ ܚܹܐܪܵܐ",
    "Thaana": "ހުރިހާ އިންސާނުން އުފަންވަނީ",
    "NKo": "ߡߐ߱ ߓߍ߲߬ ߛߏߟߏߣߍ߲߫",
    "Devanagari": "सभी मनुष्यों को हिन्दु मैं",
    "Bengali": "সমস্ত মানুষ স্বাধীনভাবে সমান",
    "Gurmukhi": "ਸਾਰਾ ਮਨੁੱਖੀ ਪਰਿਵਾਰ ਆਪਣੀ",
    "Gujarati": "પ્રતિષ્ઠા અને અધિકારોની દૃષ્ટિએ",
    "Oriya": "ସମସ୍ତ ମନୁଷ୍ୟ ଜନ୍ମକାଳରୁ",
    "Tamil": "மனிதப் பிறவியினர் சகலரும் கொ",
    "Telugu": "ప్రతిపత్తిస్వత్వముల విషయమున",
    "Kannada": "ಎಲ್ಲಾ ಮಾನವರೂ ಸ್ವತಂತ್ರರಾಗಿಯೇ",
    "Malayalam": "മനുഷ്യരെല്ലാവരും തുല്യാവകാശങ്ങളോടും",
    "Sinhala": "සියලු මනුෂ්‍යයෝ ශ්‍රී ලංකා",
    "Thai": "มนุษย์ ทั้งหลาย เกิดมามี ที่นี่ น้ำ",
    "Lao": "ມະນຸດ ທຸກຄົນ ເກີດມາມີ ນໍ້າ ນ້ຳ",
    "Tibetan": "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་ རྐྱེན་",
    "Burmese": "လူတိုင်းသည် တူညီလွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့်",
    "Khmer": "មនុស្ស ទាំងអស់ កើតមក មានសេរីភាព",
    "Georgian": "ყველა ადამიანი იბადება თავისუფალი",
    "Ethiopic": "የሰው ልጅ ሁሉ ሲወለድ ነጻ",
    "Cherokee": "ᏂᎦᏓ ᎠᏂᏴᏫ ᏂᎨᎫᏓᎸᎾ",
    "Canadian": "ᐃᓅᔪᓕᒫᑦ ᐊᓂᖅᑎᕆᔪᑦ ᐃᓄᓕᒫᑦ",
    "Mongolian": "ᠬᠦᠮᠦᠨ ᠪᠦᠷ ᠲᠥᠷᠥᠵᠦ",
    "Hangul": "모든 인간은 태어날 때부터",
    "Hiragana": "すべての にんげんは うまれながらに だがぱ",
    "Katakana": "スベテノ ニンゲンハ ガギグ ﾊﾞﾊﾟ ｶﾞ",
    "Bopomofo": "ㄖㄣˊ ㄖㄣˊ ㄕㄥ",
    "Chinese": "人人 生而自由 在尊严和权利上",
    "Yi": "ꊿꂷ ꃅꄿ ꐨꐥ",
    "Javanese": "ꦱꦧꦼꦤ꧀ ꦮꦺꦴꦁ ꦏꦭꦲꦶꦂꦫꦏꦺ",
    "Balinese": "ᬲᬫᬶᬬᬦ᭄ ᬫᬦᬸᬲᬦᬾ",
    "Tifinagh": "ⵉⵎⴷⴰⵏⴻⵏ ⴰⴽⴽⵯ ⵜⵜⵍⴰⵍⴻⵏ",
    "Adlam": "𞤋𞤲𞥆𞤢𞤥𞤢 𞤢𞤣𞤫𞥅𞤶𞤭",
    "Tagalog": "ᜀᜅ᜔ ᜎᜑᜆ᜔ ᜈᜅ᜔",
    "Limbu": "ᤕᤠᤰᤌᤢᤱ ᤏᤠᤣ",
    "Meetei": "ꯃꯤ ꯈꯨꯗꯤꯡꯃꯛ ꯄꯣꯛꯄ",
    "Chakma": "𑄝𑄬𑄇𑄴 𑄟𑄚𑄪𑄌𑄴",
    "emoji": "❤️ 👩‍💻 👍🏽 🏳️‍🌈 1️⃣ 🇫🇷 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
}
KIND, TASK = KINDS["qa"], Task("t", "f1", "qa", ())


def rules(name):
    """The normalizer and the pre-tokenizer of a kind of tokenizer; None of a byte-level one."""
    bert = pre_tokenizers.BertPreTokenizer()
    return {
        "lower": (normalizers.BertNormalizer(), bert),
        "cased": (normalizers.BertNormalizer(lowercase=False, strip_accents=False), bert),
        "nfc": (normalizers.NFC(), pre_tokenizers.Whitespace()),
        "nfkc": (normalizers.NFKC(), pre_tokenizers.Metaspace()),
        "stripped": (
            normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
            pre_tokenizers.WhitespaceSplit(),
        ),
    }[name]


def tokenizer_for(texts, folder, name, single):
    """A tokenizer whose pieces are the characters of the texts, or with `single` their words as far as it sees them."""
    normalizer, splitter = rules(name)
    seen = [normalizer.normalize_str(text) for text in texts]
    parts = {word for text in seen for word, _ in splitter.pre_tokenize_str(text)}
    pieces = sorted({character for part in parts for character in part} | {"\u2581"})
    pieces = [*pieces, *(sorted(parts) if single else ())]
    vocabulary = {
        piece: i for i, piece in enumerate(dict.fromkeys([*SPECIAL, *pieces, *(f"##{piece}" for piece in pieces)]))
    }
    backend = RustTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=1000))
    backend.normalizer, backend.pre_tokenizer = normalizer, splitter
    backend.save(str(folder / "tokenizer.json"))
    return build_tokenizer("HuggingFace", tokenizer_model=folder)


def told(tokenizer, context, gold, begin):
    """The text of the pieces of the gold answer."""
    rows = KIND.encode(TASK, [Example(("who", context), Answers((gold,), (begin,)))], tokenizer, 4000)
    first, last = rows.targets[0]
    return KIND.predictions(TASK, rows, np.array([[9.0, first, last, 0.0]]))[0]


@pytest.mark.parametrize("name", ["lower", "cased", "nfc", "nfkc", "stripped"])
@pytest.mark.parametrize("single", [True, False], ids=["words", "characters"])
def test_the_gold_pieces_give_the_gold_text_in_every_script(tmp_path, name, single):
    wrong = {}
    texts = [unicodedata.normalize(form, text) for text in SENTENCES.values() for form in ("NFC", "NFD")]
    tokenizer = tokenizer_for(texts, tmp_path, name, single)
    for context in texts:
        begin = 0
        for gold in context.split(" "):
            found = told(tokenizer, context, gold, begin)
            if found != gold:
                wrong[gold] = found
            begin += len(gold) + 1
    assert wrong == {}


@pytest.mark.parametrize(
    ("context", "spans", "first", "last", "expected"),
    [
        ("\U0001f469\u200d\U0001f4bb", [(0, 1), (2, 3)], 0, 0, "\U0001f469"),  # the pieces separate the cluster
        ("\U0001f469\u200d\U0001f4bb", [(0, 1), (2, 3)], 0, 1, "\U0001f469\u200d\U0001f4bb"),
        ("\u092e\u0948\u0902 a", [(0, 1), (1, 2)], 0, 0, "\u092e"),
        ("\u092e\u0948\u0902 a", [(0, 1), (1, 2), (4, 5)], 0, 1, "\u092e\u0948\u0902"),
        ("no \u0600\u0661\u0662", [(0, 2), (4, 6)], 1, 1, "\u0600\u0661\u0662"),
        ("\u05e9\u05dc\u200f a", [(0, 2), (4, 5)], 0, 0, "\u05e9\u05dc"),  # a mark of direction is no part of a letter
        ("cafe \u0301", [(0, 4)], 0, 0, "cafe"),
    ],
)
def test_an_answer_ends_where_the_pieces_or_the_characters_end(context, spans, first, last, expected):
    assert text_of_pieces(context, np.array(spans), first, last) == expected
