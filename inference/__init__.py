"""How heads are used: the target, the verifier, the decoding loop and `Speculator`."""
