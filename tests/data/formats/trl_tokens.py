"""What TRL's own data preparation makes of its formats.

`python -m tests.data.formats.trl_tokens` writes `trl.json`. It needs TRL (`pip install trl==1.16.0`), which
nothing else here does.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent
KEPT = FOLDER / "trl.json"
TEMPLATE_END = "    {{- '<|im_end|>\\n' -}}\n"
MODES = {
    "language_modeling": False,
    "prompt_completion": True,
    "conversational_language_modeling": False,
    "conversational_prompt_completion": True,
}
"""TRL's names for the types of its data sets, and whether the loss covers completions only."""


def generating(template: str) -> str:
    """The template with `{% generation %}` around what the assistant says, by which TRL tells its turns."""
    said = "    {{- say(message.content) -}}\n"
    end = TEMPLATE_END + "    {%- endif -%}\n{%- endfor -%}\n{%- if add_generation_prompt -%}"
    begin = template.index(said)
    stop = template.index(end)
    inner = template[begin:stop] + "    {{- '<|im_end|>' -}}\n"
    tagged = "    {%- generation -%}\n" + inner + "    {%- endgeneration -%}\n    {{- '\\n' -}}\n"
    plain = template[begin:stop] + TEMPLATE_END
    of_whom = "    {%- if message.role == 'assistant' -%}\n"
    both = f"{of_whom}{tagged}    {{%- else -%}}\n{plain}    {{%- endif -%}}\n"
    return template[:begin] + both + template[stop + len(TEMPLATE_END) :]


def records(name: str) -> list[dict[str, Any]]:
    """The records of a file beside this one."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def prepared(name: str, tokenizer: Any, assistant_only: bool = False) -> list[dict[str, list[int]]]:
    """Ids and labels of the records of a file, by the method of TRL's `SFTTrainer` that prepares data."""
    from datasets import Dataset
    from trl import SFTTrainer

    trainer = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=None, completion_only_loss=MODES[name], _is_vision_dataset=False
    )
    args = SimpleNamespace(
        dataset_num_proc=None, dataset_text_field="text", assistant_only_loss=assistant_only,
        max_length=None, truncation_mode="keep_start", packing=False, shuffle_dataset=False,
        padding_free=False, use_liger_kernel=False,
    )  # fmt: skip
    data = Dataset.from_list(records(name))
    found = SFTTrainer._prepare_dataset(trainer, data, tokenizer, args, False, None, "train")
    return [{key: row[key] for key in ("input_ids", "labels")} for row in found]


def everything() -> dict[str, Any]:
    """All that is kept, by file; conversations also with a template that has `{% generation %}`."""
    from seqbraid.data.tiny import tiny_training_model

    tokenizer = tiny_training_model("llama")[1]
    made: dict[str, Any] = {name: prepared(name, tokenizer) for name in MODES}
    tokenizer.chat_template = generating(tokenizer.chat_template)
    name = "conversational_language_modeling"
    made[f"{name}, assistant_only_loss"] = prepared(name, tokenizer, assistant_only=True)
    return made


def main() -> None:
    """Write what TRL makes now."""
    import trl

    made = {"trl": trl.__version__, "made": everything()}
    KEPT.write_text(json.dumps(made, indent=None, separators=(",", ":")).replace("},{", "},\n{") + "\n")
    print(f"wrote {KEPT.name} of TRL {trl.__version__}")


if __name__ == "__main__":
    main()
