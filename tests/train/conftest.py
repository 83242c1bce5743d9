"""What the tests of training share: targets, and an accelerator of one process."""

import pytest
import training
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from chats import CHATML, LLAMA3, bpe, make_target

from selfdraft.inference.target import TargetModel


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return training.make_target()


@pytest.fixture
def accelerator() -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


@pytest.fixture(scope="session")
def chatml():
    return make_target(bpe(CHATML, ["<|im_start|>", "<|im_end|>"], None))


@pytest.fixture(scope="session")
def llama3():
    return make_target(bpe(LLAMA3, ["<|head|>", "<|/head|>", "<|bos|>", "<|eot|>"], "<|bos|>"))
