#!/usr/bin/env bash
# What only GPUs answer: parts of this list, each within its seconds, its results in OUT as soon as they are there.
#
#   bash benchmarks/on_gpus.sh OUT [PART ...]
#
# From a checkout whose python3 has torch with CUDA, vLLM, and for `peer` TRL; without a PART the list. One part that fails or takes
# too long leaves the others alone; OUT/done says how each ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
export VLLM_USE_FLASHINFER_SAMPLER=0  # it would be compiled for a minute first, or isn't there
TEST="python3 -m pytest -q -m gpu -n 0 -p no:cacheprovider -p no:logging"
RANKS="python3 -m torch.distributed.run --standalone"
ENGINES="python3 benchmarks/gpu_engines.py --out OUT/engines_PART.json --limit-s"

# PART SECONDS COMMAND; words of a command are parted by blanks alone. OUT and PART are filled in.
LIST="
prefix_tests     90  $TEST tests/gpu/test_shards_gpu.py::test_shared_beginnings_in_the_kernel tests/gpu/test_shards_gpu.py::test_a_rank_s_chunks_in_the_kernel_and_with_a_mask
prefixes        240  python3 benchmarks/prefix_sharing.py --model 0.5B --device cuda --prompts 256 1024 4096 --completions 128 512 --group-sizes 8 16 --row-tokens 16384 --out OUT/prefix_sharing.json
peer            560  python3 benchmarks/peer_trl.py --steps 23 --parts polyturn/full polyturn/shared trl --out OUT/peer_trl.json
first_steps     120  python3 benchmarks/first_steps.py --out OUT/first_steps.json
profile          90  python3 benchmarks/trainer_profile.py 135M/384x64/rows32k/full/compiled --steps 4
server_lora     360  $ENGINES 350 --case-limit-s 345 --cases vllm_server/lora
server_single   240  $ENGINES 230 --cases vllm_server/single_copy
server_restart  360  $ENGINES 350 --case-limit-s 345 --cases vllm_server/restart
vllm_float32    200  $ENGINES 190 --cases vllm/single_copy/float32
checkpoint      420  python3 benchmarks/checkpoint.py --parameters 1.5e9 --device cuda --saves 1 --folder /tmp --out OUT/checkpoint.json
planner_float32  90  python3 benchmarks/planner_gpu.py --cases train/Qwen2.5-0.5B/float32 --out OUT/planner.json
vllm_tests      240  $TEST tests/gpu/test_vllm_gpu.py tests/gpu/test_single_copy_gpu.py
two_tests       500  $TEST tests/gpu/test_shards_gpu.py
two_vllm        200  $TEST tests/gpu/test_vllm_gpu.py::test_an_engine_lies_on_the_gpu_that_it_was_given
two_one_rank    120  $RANKS --nproc-per-node 1 benchmarks/trainer_scaling.py --model 1.5B --out OUT/scaling_1.json
two_one_copy    100  $RANKS --nproc-per-node 1 benchmarks/trainer_scaling.py --model 1.5B --parallel ddp --out OUT/scaling_1.json
two_fsdp2       120  $RANKS --nproc-per-node 2 benchmarks/trainer_scaling.py --model 1.5B --out OUT/scaling_2.json
two_zero1       100  $RANKS --nproc-per-node 2 benchmarks/trainer_scaling.py --model 1.5B --parallel zero1 --out OUT/scaling_2.json
two_ddp         100  $RANKS --nproc-per-node 2 benchmarks/trainer_scaling.py --model 1.5B --parallel ddp --out OUT/scaling_2.json
two_layers      120  $RANKS --nproc-per-node 2 benchmarks/trainer_scaling.py --model 1.5B --tensor-ranks 2 --out OUT/scaling_2.json
two_gather       90  $RANKS --nproc-per-node 2 benchmarks/gather_shards.py --model 1.5B --out OUT/gather_shards.json
two_64k         150  $RANKS --nproc-per-node 2 benchmarks/trainer_scaling.py --model 0.5B --context-ranks 2 --samples 1 --sample-tokens 65536 --row-tokens 65536 --activations full --steps 3 --out OUT/context_2.json
two_64k_one     150  $RANKS --nproc-per-node 1 benchmarks/trainer_scaling.py --model 0.5B --samples 1 --sample-tokens 65536 --row-tokens 65536 --activations full --steps 3 --out OUT/context_1.json
two_push        240  python3 benchmarks/push_nccl.py --out OUT/push_nccl.json --limit-s 230
two_engines     310  $ENGINES 300 --case-limit-s 295 --cases vllm_server/nccl
two_placements  530  python3 benchmarks/placements.py --out OUT/placements.json --limit-s 520 --case-limit-s 300
"

if [[ $# -lt 2 ]]; then
  grep -E '^[a-z]' <<< "$LIST" | awk '{ printf "%-16s %4d s\n", $1, $2 }'
  exit 2
fi
out=$1
shift
mkdir -p "$out"
python3 - <<'EOF' | tee "$out/missing"
from importlib.util import find_spec
missing = [name for name in ("torch", "vllm", "trl", "pytest", "pytest_asyncio", "hypothesis", "xdist") if find_spec(name) is None]
if missing:
    print(f"not installed, so some parts will fail: {', '.join(missing)}")
EOF
for part in "$@"; do
  read -r _ seconds command < <(grep -E "^$part " <<< "$LIST") || { echo "no part $part" | tee -a "$out/done"; continue; }
  command=${command//OUT/$out} command=${command//PART/$part} began=$SECONDS
  # shellcheck disable=SC2086
  timeout --kill-after=10 "$seconds" $command > "$out/$part.log" 2>&1
  echo "$part: exit code $? after $((SECONDS - began)) s" | tee -a "$out/done"
done
