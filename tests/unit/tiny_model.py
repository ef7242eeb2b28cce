"""A tiny random Llama with a tokenizer of single characters, as an engine and as a folder."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import HuggingFaceEngine
from kvdata.models.kv_autoencoder import KVAutoencoder
from kvdata.models.low_rank import whitened_basis

CHARACTERS = sorted(set(string.printable) - set("\t\r\x0b\x0c"))  # 96 of them


def tiny_model(initializer_range: float = 0.2) -> LlamaForCausalLM:
    """Three layers of two KV heads; a larger range makes attention prefer some tokens more to others."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=initializer_range,
    )
    return LlamaForCausalLM(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)} | {"?unknown": len(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?unknown")


def tiny_engine(initializer_range: float = 0.2) -> HuggingFaceEngine:
    return HuggingFaceEngine(tiny_model(initializer_range), tiny_tokenizer(), model_name="unit/model")


def tiny_folder(folder: Path) -> Path:
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def windows(count: int, tokens: int, following: int, seed: int) -> list[dict]:
    """Prefix records of random ids, of two documents in turn."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(96, (count, tokens + following), generator=generator).tolist()
    return [
        {"tokens": row[:tokens], "continuation": row[tokens:], "meta": {"name": f"document <{i % 2}>"}}
        for i, row in enumerate(ids)
    ]


def tiny_autoencoder(engine: HuggingFaceEngine) -> KVAutoencoder:
    """Of 8 bits a number, along the axes there are."""
    model = KVAutoencoder(3, 2, 8, Rope.from_config(engine.config), sinks=4)
    axes = torch.eye(16).expand(2, 3, 16, 16)
    model.initialise(whitened_basis(axes, axes), torch.zeros(2, 3, 16), torch.full((2, 3, 16), 8))
    return model
