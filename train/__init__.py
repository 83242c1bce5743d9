"""How heads are learned: config, data, distillation, the trainer.  `train` knows data."""
