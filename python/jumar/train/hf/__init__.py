"""The second engine of ``jumar train``: folders in Hugging Face layout, by ``transformers.Trainer`` and peft.

``records`` reads data, ``chat`` renders conversations and finds the answers in them, ``dataset`` makes sequences and batches,
``model`` loads, adapts and converts, ``trainer`` is transformers' Trainer with jumar's checkpoints and records, ``run`` is
what :mod:`jumar.train.runner` calls.
"""
