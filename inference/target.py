"""TargetModel: the frozen language model, as drafting heads and the decoding loop see it.

Shape suffixes: B rows, T tokens, N draft nodes, K taps, D hidden width, V vocabulary, S slots.
"""

from __future__ import annotations

import inspect
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.errors import InputError
from ..heads.protocols import Features
from ..heads.spec import TargetSpec
from . import loading, packed
from .adapters import has_adapter_layers
from .attention import use_grouped_attention
from .cache import SlotCache
from .masks import layer_kinds, sliding_window, slot_masks
from .offload import home, in_memory
from .prefill import prefill
from .probe import probe_target
from .projection import Projection, embedder
from .ragged import ragged
from .random_target import random_model
from .taps import decoder_layers, evaluating, tapped
from .weights import target_weights


class TargetModel:
    """A transformers decoder-only model that is only read.

    Attributes:
        tokenizer: of the model; None when prompts are given as ids.
        eos_ids: ids that end a generation.
        packed: linears that run on reordered weights.
        ragged: forwards leave out the padding of rows of unlike numbers of draft nodes.
        weights: dense weights that new heads may start from.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        pack: bool = False,
        named: dict[str, Any] | None = None,
    ) -> None:
        """Wraps a loaded model, which is not modified unless `pack` is asked for.

        Args:
            named: how it was named (model, gguf_file, ..), kept in `spec.identity`.
        Raises:
            InputError: a model that cannot be decoded in drafts, by name.
        """
        self.model, self.tokenizer = model, tokenizer
        self.config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self.decoder: Any = model.get_decoder()  # type: ignore[operator]
        self.layers = decoder_layers(self.decoder, self.config.num_hidden_layers)
        parameters = inspect.signature(self.decoder.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.device, self.dtype = home(model), next(model.parameters()).dtype
        self.embedding, self.lm_head = self._ends()
        self.window = sliding_window(self.config)
        self.mask_kinds = layer_kinds(model, self.config)
        self.eos_ids = self._eos_ids()
        self._projection = projection = Projection(self.lm_head, self.config)
        self._named = named or {"model": getattr(model.config, "_name_or_path", None)}
        self._identity = cache(partial(loading.identity, model, tokenizer, self.vocab_size))
        self.weights = target_weights(self.decoder, self.layers, projection.start_rows, self.device)
        frees = pack and any(map(packed.is_packable, self.decoder.modules()))
        if frees or any(weight.is_meta for weight in model.parameters()):  # which forwards untie
            self._identity()
        self.packed = packed.pack_linears(self.decoder) if pack else 0
        self.ragged = pack and use_grouped_attention(model) and self.device.type == "cpu"
        self._modules = list(model.modules())  # to walk them takes 2 ms, too long for each forward
        with evaluating(self._modules):
            probe_target(self)

    @classmethod
    def load(
        cls,
        model: str | None = None,
        *,
        gguf_file: str | None = None,
        revision: str | None = None,
        adapter: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        device_map: str | dict[str, Any] | None = None,
        random: dict[str, Any] | None = None,
        seed: int = 0,
        pack: bool = True,
    ) -> TargetModel:
        """Loads a target by name.

        Args:
            model: hub id, local folder, or package://NAME.
            gguf_file: a file in that folder, dequantised to `dtype`.
            adapter: a peft adapter: its folder or hub id.
            device_map: `auto`, or a device (or `disk`) by module: spreads a model that no single
                device holds, as transformers does.
            random: instead of `model`, a transformers config initialised from `seed`.
            pack: attention without copies of keys and, on a CPU, fp32 linears with reordered
                weights and forwards without padding.
        Raises:
            InputError: whatever is wrong with the names or the files.
        """
        if (model is None) == (random is None):
            raise InputError("a target needs one of model and random", "Give exactly one.")
        texts = {"model": model, "gguf_file": gguf_file, "revision": revision, "adapter": adapter}
        loading.check_named(texts, random)
        if device_map is not None:
            loading.check_spread(device=device, random=random, adapter=adapter)
        place = loading.resolve_device(device)
        kind = loading.resolve_dtype(dtype, place)
        if random is not None:
            loaded, tokenizer = random_model(random, seed, kind)
        else:
            assert model is not None
            loaded, tokenizer = loading.load_pretrained(
                model,
                gguf_file=gguf_file,
                revision=revision,
                dtype=kind,
                adapter=adapter,
                device_map=device_map,
            )
        named: dict[str, Any] = {**texts, "random": random, "seed": seed if random else None}
        named["adapter_fingerprint"] = adapter and loading.adapter_fingerprint(adapter)
        loaded.eval().requires_grad_(False)
        if device_map is not None:
            return cls(loaded, tokenizer, named=named)
        pack = pack and not has_adapter_layers(loaded)
        return cls(loaded.to(place), tokenizer, pack=pack, named=named)

    # -- what it is ------------------------------------------------------------------------------

    def _ends(self) -> tuple[Any, Any]:
        """Embedding and lm_head, in memory wherever the layers are."""
        model: Any = self.model
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        embedding, lm_head = (in_memory(end, self.device) for end in ends)
        if lm_head is not ends[1] and self.config.tie_word_embeddings:
            lm_head.weight = embedding.weight
        return embedding, lm_head

    @property
    def vocab_size(self) -> int:
        """Ids that its logits are over."""
        return self._projection.vocab_size

    @property
    def max_positions(self) -> int:
        """Tokens of a row at most."""
        return getattr(self.config, "max_position_embeddings", None) or 2**31

    @cached_property
    def spec(self) -> TargetSpec:
        """What heads know of it; made when asked for, since it takes a hash of every weight."""
        return self._spec(self._named | self._identity())

    def _spec(self, identity: dict[str, Any]) -> TargetSpec:
        return TargetSpec(
            hidden_size=self.config.hidden_size,
            vocab_size=self.vocab_size,
            num_layers=self.config.num_hidden_layers,
            max_positions=self.max_positions,
            embed=embedder(self.embedding, self.config),
            projector=self._projection,
            identity=identity,
            device=self.device,
            dtype=self.dtype,
            config=self.config,
        )

    def _eos_ids(self) -> set[int]:
        """Of a target's generation_config only eos and pad ids are read."""
        config = getattr(self.model, "generation_config", None)
        ids = getattr(config, "eos_token_id", None)
        if ids is None:
            ids = getattr(self.tokenizer, "eos_token_id", None)
        return {ids} if isinstance(ids, int) else set(ids or [])

    def conditions(self) -> dict[str, Any]:
        """Which path is in use, for benchmarks."""
        return {
            "target": self.spec.identity["model"] or self.config.model_type,
            "dtype": self.spec.identity["dtype"],
            "device": str(self.device),
            "linears": f"{packed.library()}-packed ({self.packed})" if self.packed else "torch",
            "attention": self.config._attn_implementation,
        }

    def chat_ids(
        self,
        messages: list[dict],
        add_generation_prompt: bool = True,
        tools: list | None = None,
        template: str | None = None,
    ) -> list[int]:
        """Ids of a conversation through `template`, or the tokenizer's own, BOS as that has it.
        Without a template, the contents joined by newlines are tokenized as they are."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return self.text_ids("\n".join(str(m.get("content") or "") for m in messages))
        encoded = self.tokenizer.apply_chat_template(
            [messages],  # a batch of one: an empty conversation is refused outside of one
            tools or None,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            return_dict=True,
        )
        return list(encoded["input_ids"][0])

    def text_ids(self, text: str) -> list[int]:
        """Ids of a text as it is."""
        if self.tokenizer is None:
            raise InputError("this target has no tokenizer", "Give prompts as lists of ids.")
        return list(self.tokenizer(text)["input_ids"])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [.., V] for inference."""
        with evaluating(self.lm_head.modules()):
            return self._projection.serving(hidden)

    # -- forwards --------------------------------------------------------------------------------

    @torch.no_grad()
    def features(self, ids_BT: Tensor, length_B: Tensor, taps: list[int]) -> Features:
        """States of right-padded rows in one pass, for training.

        Returns:
            `hidden` [B, T, D] and, for taps, `taps` [B, T, K, D]; past a row's length undefined.
        """
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
        # Causal attention never looks at the padding on the right, so no mask is needed.
        return self._run(taps, input_ids=ids_BT, position_ids=positions, use_cache=False)

    def new_cache(self, rows: int, capacity: int) -> SlotCache:
        """An empty cache for `rows` rows."""
        return SlotCache(self.config.num_hidden_layers, rows, capacity)

    def prefill(
        self, ids_BT: Tensor, lengths: list[int], cache: SlotCache, taps: list[int]
    ) -> Features:
        """Reads right-padded prompts into an empty cache; returns the features of all tokens.  It
        pays to sort rows by length, see `prefill.like_lengths`."""
        return prefill(self.forward, ids_BT, lengths, cache, taps)

    def forward(
        self,
        ids_BN: Tensor,
        cache: SlotCache,
        ancestors_BNN: Tensor,
        depth_BN: Tensor | None,
        taps: list[int],
        valid_BN: Tensor | None = None,
    ) -> Features:
        """States after each draft node; the nodes' keys and values enter the cache's next slots.

        Args:
            ancestors_BNN: entry (n, m): node n may look at node m; the first axis may be 1.
            depth_BN: depth of each node below the root, on the host; None for a chain.
            valid_BN: False for what only pads a row, whose states are undefined.
        """
        nodes = ids_BN.shape[1]
        rows = ragged(valid_BN, self.device) if self.ragged else None
        length_B = cache.open(nodes, self.device, rows)
        depth = torch.arange(nodes)[None] if depth_BN is None else depth_BN
        # Nodes that pad a row may lie past the last position; nothing reads them.
        position_BN = length_B[:, None] + depth.to(self.device)
        position_BN.clamp_(max=self.max_positions - 1)
        mask = slot_masks(
            self.mask_kinds,
            length_B,
            position_BN,
            ancestors_BNN.to(self.device),
            cache.end,
            self.window,
            self.dtype,
        )
        options = {self._cache_name: cache, "use_cache": True, "attention_mask": mask}
        if rows is None:
            return self._run(taps, input_ids=ids_BN, position_ids=position_BN, **options)
        for one in mask.values() if isinstance(mask, dict) else [mask]:
            one.ragged = rows  # type: ignore[attr-defined]
        features = self._run(
            taps, input_ids=rows.close(ids_BN), position_ids=rows.close(position_BN), **options
        )
        return {name: rows.open(value) for name, value in features.items()}

    def _run(self, taps: list[int], **inputs: Any) -> Features:
        with evaluating(self._modules), tapped(self.layers, taps) as states:
            features = {"hidden": self.decoder(**inputs).last_hidden_state.to(self.device)}
        if taps:
            features["taps"] = torch.stack([states[tap].to(self.device) for tap in taps], 2)
        return features
