"""Targets that the tests of training share."""

import pytest
from chats import CHATML, LLAMA3, bpe, make_target


@pytest.fixture(scope="session")
def chatml():
    return make_target(bpe(CHATML, ["<|im_start|>", "<|im_end|>"], None))


@pytest.fixture(scope="session")
def llama3():
    return make_target(bpe(LLAMA3, ["<|head|>", "<|/head|>", "<|bos|>", "<|eot|>"], "<|bos|>"))
