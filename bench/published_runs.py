"""Published runs as configurations: which device and framework they are of, and which keys say what was run. Each source is read as it describes itself."""

from collections.abc import Callable
from dataclasses import dataclass, field

GIB = 1 << 30
# The bus bandwidth that these jobs measured themselves falls with each doubling of the hosts; that of whole steps falls less. One number of the cluster, taken
# from the sweep as a whole.
CONTENDED = (("[between]\n", "[between]\ncontention = 0.06\n"),)

# The sweep was run in two campaigns, which its job numbers tell apart. In the first what layers gather stays until backward: there a rank with tp of 4 to 32
# reserves two whole inputs a layer more than in the second, whatever the sizes.
GATHERS_AGAIN_FROM = 13_700_000

# torchtitan's H100, as its tables name them: 96 GB of HBM2e at 2.4 TB/s, held to 500 W.
HELD_H100 = (("memory_gb = 80\n", "memory_gb = 96\n"),
             ("memory_gb_per_s = 3350\n", "memory_gb_per_s = 2400\n"), ("power_w = 700\n", "power_w = 700\nheld_to_w = 500\n"))


@dataclass
class Run:
    device: str
    framework: str
    world: int
    sets: list[str]
    seconds: float | None = None  # of a step, as measured; None: not usable for time
    group: str = ""  # runs among which a layout is chosen
    plainness: tuple = ()  # the least is the anchor
    regime: str = ""
    unsupported: str = ""
    reserved: float = 0.0  # bytes, as measured on rank 0
    fits: bool | None = None
    capacity: float = 0.0
    changes: tuple[tuple[str, str], ...] = ()  # of the device's file, old and new: what is known of this cluster

    @property
    def is_scored(self) -> bool:
        """Whether there is anything to hold a plan against."""
        return not self.unsupported and (self.seconds is not None or self.fits is not None)


@dataclass(frozen=True)
class Source:
    name: str
    file: str
    read: Callable[[dict], list[Run]] = field(repr=False)
    sweep: bool = False  # of layouts good and bad, which tell a model from a constant rate
    note: str = ""


def sets_of(**keys: object) -> list[str]:
    """model_dim=4 -> "model.dim=4"."""
    return [f"{key.replace('__', '.')}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items() if value is not None]


def llama(row: dict) -> list[str]:
    return sets_of(model__family="llama", model__dim=row["hidden_size"], model__layers=row["num_layers"], model__heads=row["num_attention_heads"],
                   model__kv_heads=row.get("num_kv_heads"), model__ffn_dim=row["ffn_hidden_size"], model__vocab_size=row["vocab_size"],
                   model__tie_embeddings=bool(row.get("tied_embeddings")), data__seq_len=row["seq_len_tokens"])


def gpt(row: dict, vocab: int) -> list[str]:
    return sets_of(model__family="gpt2", model__dim=row["hidden_size"], model__layers=row["num_layers"], model__heads=row["num_attention_heads"],
                   model__ffn_dim=4 * row["hidden_size"], model__vocab_size=vocab, model__tie_embeddings=True, data__seq_len=row["seq_len_tokens"])


def layout(tp: int, pp: int, dp: int, zero: int, micro: int, batch: int, schedule: str = "1f1b") -> list[str]:
    shard = {"mesh__dp_shard": dp} if zero else {"mesh__dp_replicate": dp}
    cut = {"pipeline__schedule": schedule} if pp > 1 else {}
    return sets_of(mesh__tp=tp, mesh__pp=pp, zero__stage=zero, batch__micro_size=micro, batch__global_size=batch, **shard, **cut)


def plainness(row: dict, batch: int) -> tuple:
    """The least is the plainest: of fewest devices, then least cut, then with most to compute."""
    return row["num_gpus"], row["tp"] * row["pp"], -row["num_layers"] * row["hidden_size"] ** 2 * batch


def sweep_h100(table: dict) -> list[Run]:
    runs = []
    for row in table["rows"]:
        micro = row["micro_batch_size_seqs"]
        tp, pp, dp, zero = row["tp"], row["pp"], row["dp"], row["zero_stage"]
        run = Run("h100", "nanotron", row["num_gpus"],
                  llama(row) + layout(tp, pp, dp, zero if dp > 1 else 0, micro, row["global_batch_size_seqs"]) + sets_of(tensor__sequence_parallel=tp > 1))
        if row.get("tied_embeddings") is None:  # failed rows do not say; those that ran are tied below 4 thousand wide
            run.sets = [s for s in run.sets if not s.startswith("model.tie")] + sets_of(model__tie_embeddings=row["hidden_size"] < 4096)
        if row.get("num_kv_heads") is None:
            run.sets += sets_of(model__kv_heads=row["num_attention_heads"])
        if row["num_attention_heads"] % tp:
            run.unsupported = "tp does not divide the heads"
        if pp > row["num_layers"]:
            run.unsupported = "more stages than layers"
        if row["job_id"] < GATHERS_AGAIN_FROM:
            run.sets += sets_of(tensor__keep_gathered=True if tp > 1 else None)
        if row.get("usable_for_time"):
            run.seconds = row["iter_time_s_derived"]
        run.group = f"{row['model']} {row['num_gpus']} {row['global_batch_size_seqs']} {row['vocab_size']}"
        run.plainness = plainness(row, row["global_batch_size_seqs"])
        run.regime = f"{row['num_gpus']} devices"
        if row["status"] in ("success", "oom"):
            run.fits, run.capacity = row["status"] == "success", 79.1 * GIB
            run.reserved = (row.get("peak_reserved_mem_gib") or 0) * GIB
        run.changes = CONTENDED
        runs.append(run)
    return runs


def sweep_a100(table: dict) -> list[Run]:
    runs = []
    for row in table["rows"]:
        micro = row["micro_batch_size_seqs"]
        runs.append(Run("a100-80gb", "megatron-deepspeed", row["num_gpus"],
                        gpt(row, 50304) + layout(row["tp"], row["pp"], row["dp"], 0, micro, row["global_batch_size_seqs"]), seconds=row["iter_time_s"],
                        group=f"{row['num_layers']} {row['hidden_size']} {row['num_gpus']} {row['global_batch_size_seqs']}",
                        plainness=plainness(row, row["global_batch_size_seqs"]),
                        regime=f"tp {row['tp']}"))
    return runs


def torchtitan(table: dict) -> list[Run]:
    runs = []
    for row in table["rows"]:
        compiled = row.get("compile")
        run = Run("h200" if "H200" in row["gpu"] else "h100", "torchtitan-compile" if compiled else "torchtitan", row["num_gpus"], [],
                  row["iter_time_s_derived"],
                  regime="compiled" if compiled else "eager", plainness=plainness(row, row["global_batch_size_seqs"]))
        if row["precision"] != "bf16":
            run.unsupported = "float8 products by module"
        if "500 W" in row["gpu"]:
            run.changes = HELD_H100
        run.sets = llama(row) + layout(row["tp"], row["pp"], row["fsdp"], 3, row["local_batch_size_seqs"], row["global_batch_size_seqs"])
        run.sets += sets_of(recompute__mode="full", mesh__cp=row["cp"], tensor__overlap=True if row.get("async_tp") else None)
        if row["activation_recompute"] != "full":  # per operator: every second product is computed again; here every second layer is
            run.sets += sets_of(recompute__every=2)
        runs.append(run)
    return runs


def megatron(table: dict) -> list[Run]:
    runs = []
    for row in table["rows"]:
        micro = row.get("micro_batch_size_seqs_bigscience_note") or row.get("micro_batch_size_seqs")
        run = Run("a100-80gb", "megatron-lm", row["num_gpus"], [], row["iter_time_s_derived"], regime=f"table {row['table']}",
                  plainness=plainness(row, row["global_batch_size_seqs"]))
        if row["zero_stage"] == 3:
            run.unsupported = "ZeRO 3 of DeepSpeed, of which there is no file"
        run.sets = gpt(row, row["vocab_size"]) + layout(row["tp"], row["pp"], row["dp"], row["zero_stage"], micro, row["global_batch_size_seqs"])
        run.sets += sets_of(recompute__mode="full")
        runs.append(run)
    return runs


def zero_bubble(table: dict) -> list[Run]:
    schedules = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb_1p", "ZB-2p": "zb_2p"}
    runs = []
    for row in table["rows"]:
        seconds = row.get("iter_time_s_derived")
        if seconds is None:
            continue
        micro = row["micro_batch_size_seqs"]
        run = Run("a100-80gb", "megatron-lm", row["num_gpus"], [], seconds, regime=row["schedule"],
                  plainness=plainness(row, micro * row["num_microbatches_per_pipeline"]))
        if row["schedule"] not in schedules:
            run.unsupported = f"schedule {row['schedule']}"
            runs.append(run)
            continue
        run.sets = gpt(row, 50304) + layout(1, row["pp"], 1, 0, micro, micro * row["num_microbatches_per_pipeline"], schedules[row["schedule"]])
        run.sets += sets_of(pipeline__virtual_stages=row.get("vp"), model__tie_embeddings=False)
        run.group = f"{row['model']} {row['num_gpus']} {row['num_microbatches_per_pipeline']}"
        runs.append(run)
    return runs


SOURCES = [
    Source("Megatron-DeepSpeed on one host of A100 (vTrain)", "vtrain_single_node_a100.json", sweep_a100, sweep=True),
    Source("Nanotron on 8 to 512 H100 (Ultra-Scale Playbook)", "hf_ultrascale_h100.json", sweep_h100, sweep=True),
    Source("torchtitan on 8 to 256 H100", "torchtitan_llama3.json", torchtitan,
           note="These H100 have 96 GB at 2.4 TB/s and are held to 500 W, which is planned as `held_to_w` says. Recomputation per operator runs every second product "
           "again; it is planned as that of every second layer."),
    Source("Megatron-LM on up to 3,072 A100 (SC21)", "megatron_ptdp_sc21.json", megatron),
    Source("Megatron-LM with zero-bubble schedules on 8 to 32 A100", "zero_bubble_iclr24.json", zero_bubble),
]
