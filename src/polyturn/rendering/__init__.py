"""Messages to token ids and back, exactly. This room knows chat templates and tokenizers, and nothing about models or environments."""
