"""Small targets with unlike chat templates, and runs on rows given in a test."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from selfdraft.inference.target import TargetModel
from selfdraft.train.config import TrainConfig

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + "
    "m['content'] + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
FORGETFUL = (  # like templates that drop the reasoning of earlier turns
    "{% for m in messages %}{{ m['role'] + ':' }}"
    "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'][:2] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}" + CHATML
SENTENCES = [
    "The owl looked for its dark room.",
    "How many legs has a spider? Eight.",
    "assistant user system, and then some more words in a line",
]
CHAT = [
    {"role": "user", "content": "How many legs has a spider?"},
    {"role": "assistant", "content": "Eight, and no more."},
    {"role": "user", "content": "And an owl?"},
    {"role": "assistant", "content": " Two\nlegs. "},
    {"role": "user", "content": "Where does it live?"},
    {"role": "assistant", "content": "In a dark room"},
]


def bpe(template: str, marks: list[str], bos: str | None) -> PreTrainedTokenizerFast:
    """A small byte-level BPE; with `bos` it puts that token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if bos:
        special = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", None, special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=marks[-1], chat_template=template
    )


def make_target(tokenizer: PreTrainedTokenizerFast, vocab_size: int = 384) -> TargetModel:
    fields = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(
        **fields, num_attention_heads=4, vocab_size=vocab_size, max_position_embeddings=256
    )
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    return TargetModel(AutoModelForCausalLM.from_config(config), tokenizer)


def make_config(folder: Path, rows: list, **data) -> TrainConfig:
    """A run on `rows` (objects, or text taken as it is)."""
    file = folder / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(line + "\n" for line in lines))
    return TrainConfig.model_validate(
        {
            "target": {"model": "x"},
            "head": {"kind": "hydra"},
            "schedule": {"steps": 1},
            "output_dir": str(folder / "run"),
            "data": {"file": str(file), "max_length": 200, "eval_prompts": 0} | data,
        }
    )


def prepared(prompt: int, answer: int, text: str = "x", temperature: float = 0.0) -> dict:
    return {
        "prompt": text,
        "prompt_ids": list(range(10, 10 + prompt)),
        "answer_ids": list(range(50, 50 + answer)),
        "temperature": temperature,
    }
