"""From a checkpoint of any strategy to other layouts and to Hugging Face's formats, and back; what such models say."""
