"""Corpora, tokenizers, samples and their order. Pure numpy: `memo data ...` must start without torch."""

from memo.data.blended import BlendedDataset
from memo.data.chat import build_chat
from memo.data.checked import checked_sample
from memo.data.completions import pack_completions
from memo.data.corpus import open_corpora, open_corpus, training_part
from memo.data.corpus_builder import BuildSummary, Reading, build_corpus, build_demo
from memo.data.facts import CorpusFacts, load_corpus_tokenizer
from memo.data.indexed import IndexedDataset, IndexedDatasetWriter
from memo.data.mock import MockDataset
from memo.data.needle import NeedleDataset
from memo.data.packed_answers import PackedConversations, PreferencePairs
from memo.data.packing import PackedDataset
from memo.data.pairs import build_pairs
from memo.data.sample import Sample, SampleDataset
from memo.data.sampler import GlobalBatchSampler
from memo.data.token_stream import TokenStream
from memo.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

__all__ = [
    "BPETokenizer",
    "BlendedDataset",
    "BuildSummary",
    "ByteTokenizer",
    "CorpusFacts",
    "GlobalBatchSampler",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "MockDataset",
    "NeedleDataset",
    "PackedConversations",
    "PackedDataset",
    "PreferencePairs",
    "Reading",
    "Sample",
    "SampleDataset",
    "TokenStream",
    "Tokenizer",
    "build_chat",
    "build_corpus",
    "build_demo",
    "build_pairs",
    "checked_sample",
    "load_corpus_tokenizer",
    "load_tokenizer",
    "open_corpora",
    "open_corpus",
    "pack_completions",
    "train_bpe",
    "training_part",
]
