"""The llama.cpp backend: GGUF files are answered, and blended, inside llama.cpp."""
