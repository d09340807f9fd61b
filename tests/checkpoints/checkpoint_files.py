"""One small state in every format there is."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

STATE = {"fc.weight": torch.arange(6.0).view(2, 3), "fc.bias": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(3)}


def write_sharded(folder: Path, ending: str) -> Path:
    folder.mkdir()
    names = {"fc.weight": f"model-1{ending}", "fc.bias": f"model-2{ending}", "n": f"model-2{ending}"}
    for file in sorted(set(names.values())):
        part = {key: STATE[key] for key in STATE if names[key] == file}
        save_file(part, folder / file) if ending == ".safetensors" else torch.save(part, folder / file)
    index = "model.safetensors.index.json" if ending == ".safetensors" else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    return folder


def make(kind: str, folder: Path) -> Path:
    match kind:
        case "safetensors":
            save_file(STATE, folder / "m.safetensors", metadata={"author": "me"})
            return folder / "m.safetensors"
        case "torch":
            torch.save(STATE, folder / "m.pt")
            return folder / "m.pt"
        case "legacy":
            torch.save(STATE, folder / "m.pth", _use_new_zipfile_serialization=False)
            return folder / "m.pth"
        case "no ending":
            torch.save(STATE, folder / "weights")
            return folder / "weights"
        case "container":
            torch.save({"state_dict": STATE, "epoch": 3}, folder / "m.ckpt")
            return folder / "m.ckpt"
        case "shards":
            return write_sharded(folder / "m", ".safetensors")
        case "torch shards":
            return write_sharded(folder / "m", ".bin")
        case "index":
            return write_sharded(folder / "m", ".safetensors") / "model.safetensors.index.json"
    raise AssertionError


KINDS = ["safetensors", "torch", "legacy", "no ending", "container", "shards", "torch shards", "index"]
