"""Hugging Face: a Trainer with the alpha objective, adapters, and the uncertainty of every token of a text.

trainer = AlphaTrainer(model, args, train_dataset=train, alpha=0.5, n_passes=10)
trainer.predict(test).prediction.mutual_information
generate_tokens(model, tokenizer(prompts, return_tensors="pt", padding=True), max_new_tokens=20).entropy
"""

from importlib.util import find_spec

for _name in ("transformers", "accelerate"):
    if find_spec(_name) is None:
        raise ImportError(f"Hugging Face models need {_name}: pip install 'bbalpha[transformers]'.")

from bbalpha.integrations.transformers.outputs import AlphaPredictionOutput  # noqa: E402
from bbalpha.integrations.transformers.tokens import TokenPrediction, generate_tokens, score_tokens  # noqa: E402
from bbalpha.integrations.transformers.trainer import AlphaTrainer  # noqa: E402

__all__ = ["AlphaPredictionOutput", "AlphaTrainer", "TokenPrediction", "generate_tokens", "score_tokens"]
