"""Small tokenizers of the kinds that differ at the ends of a text."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "The keeper opens the gate at six and closes it at ten.",
    "Who opens the gate? The keeper does, every day but one.\n\nAsk the keeper of the gate.",
]

# What tools may look like in a prompt: as JSON on a line (Qwen), and in a form of its own (gpt-oss).
JSON_TEMPLATE = (
    "{% for m in messages %}{% if loop.first and tools %}<s>tools\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}</s>{% endif %}"
    "<s>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORM_TEMPLATE = (
    "{% for t in tools or [] %}// {{ t.function.description }}\ntype {{ t.function.name }} = ("
    "{% for k, v in t.function.parameters.properties.items() %}{{ k }}: {{ v.type }}, "
    "// {{ v.description }}\n{% endfor %})\n{% endfor %}"
    "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
)


def byte_level(*, bos: bool, template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as DeepSeek, Llama 3 and Qwen have it; ``bos`` puts one before every text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<bos>", "<s>", "</s>"], initial_alphabet=alphabet
    )
    made.train_from_iterator(TEXTS, trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", made.token_to_id("<bos>"))]
        )
    return _wrapped(made, template)


def metaspace(*, merges_newlines: bool = False) -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE, as Llama 2 has it: a space before every text, and a BOS."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    first = pre_tokenizers.Metaspace(prepend_scheme="first")
    alone = pre_tokenizers.Split("\n", "isolated")  # a byte token in Llama 2
    made.pre_tokenizer = first if merges_newlines else pre_tokenizers.Sequence([alone, first])
    made.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<bos>"])
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", made.token_to_id("<bos>"))]
    )
    return _wrapped(made, None)


def _wrapped(made: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>")
    tokenizer.chat_template = template
    return tokenizer
