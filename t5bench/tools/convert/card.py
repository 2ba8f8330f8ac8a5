"""The model card of an export: what was trained, on what, how, and with what result."""

from t5bench.corpus.index import read_record
from t5bench.record.run import Run
from t5bench.tools.convert.trained import TrainedModel

HOW_GPT = """\
`add_special_tokens=False` matters if the model was trained with a T5's tokenizer, which otherwise ends a prompt in
`</s>`: the model has learnt that another document begins there.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".")
inputs = tokenizer("The", add_special_tokens=False, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs)[0]))
```"""
WHY_BLENDERBOT = """\
The class is Blenderbot's because that is the architecture Megatron trains under the name T5: LayerNorm before each
block, learned positions, biases, and a tied output with a bias. `T5ForConditionalGeneration` is another one.

"""
HOW_T5 = """\
```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".", use_fast=False)
model = AutoModelForSeq2SeqLM.from_pretrained(".")
inputs = tokenizer("The <extra_id_0> walks in <extra_id_1> park.", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs)[0]))
```"""
TITLES = {"gpt": "GPT-2", "t5": "T5"}
TASKS = {"gpt": "text-generation", "t5": "text2text-generation"}


def model_card(model: TrainedModel) -> str:
    architecture = model.architecture
    family = architecture.family
    layers = (
        f"{architecture.encoder_layers} + {architecture.decoder_layers}" if family == "t5" else f"{architecture.layers}"
    )
    title = architecture.kind or TITLES[family]
    facts = {
        "Model": f"{title}: {layers} layers, hidden size {architecture.hidden}, {architecture.heads} heads,"
        f" feed-forward size {architecture.ffn} ({model.activation})",
        "Vocabulary": f"{architecture.padded_vocabulary:,} rows, including those that pad it",
        "Weights": f"of iteration {model.iteration}, {str(model.dtype).removeprefix('torch.')},"
        " as the engine computes with them",
    }
    facts |= recorded_facts(model.record) if model.record else {"Training": "not recorded"}
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    header = f"---\nlibrary_name: transformers\npipeline_tag: {TASKS[family]}\n---\n"
    table = f"| | |\n|---|---|\n{rows}\n"
    limits = "This model comes from a benchmark: it was trained to compare training strategies, not to be used."
    how = HOW_GPT
    if family == "t5":
        how = HOW_T5 if architecture.kind else WHY_BLENDERBOT + HOW_T5
    return f"{header}\n# {model.directory.resolve().name}\n\n{table}\n{limits}\n\n## Use\n\n{how}\n"


def recorded_facts(record: Run) -> dict[str, str]:
    plan = record.plan
    layout = record.layout
    done = record.iterations[-1] if record.iterations else None
    commits = record.record["commits"]
    prefix = record.record["data"]["prefix"]
    data = read_record(prefix).get("source", prefix)
    facts = {
        "Data": f"{data}; index sha256 {record.record['data']['idx_sha256']}",
        "Strategy": f"{plan.strategy.title}: TP {layout.tp}, PP {layout.pp}, DP {layout.dp}, {plan.precision}"
        f" on {layout.nnodes} node(s), {plan.device}",
        "Engine": f"{plan.engine}, commit {commits['engine'] or commits['repository']}",
        "Recipe": f"global batch {plan.value('GLOBAL_BATCH_SIZE')}, learning rate {plan.value('LR')},"
        f" {plan.iterations} iterations planned, seed {plan.named_arguments.get('seed', '?')}",
        "Status of the run": record.status,
    }
    if done:
        facts["Training loss"] = f"{done.lm_loss} at iteration {done.iteration}"
    evaluations = record.evaluations
    if evaluations:
        last = evaluations[-1]
        facts["Validation loss"] = f"{last.lm_loss} at iteration {last.iteration} (perplexity {last.perplexity})"
    return facts
