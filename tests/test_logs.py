# ruff: noqa: E501, lines of logs
"""The loss that a training's log holds, in the formats of the programs that people train with."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mup_tpu.errors import ConfigError
from mup_tpu.logs import LossUnknown, TrainingLog


@dataclass(frozen=True)
class Sample:
    """Lines in the format of a program, with numbers of our own, and what they say."""

    text: str
    loss: float
    step: int | None = None
    steps: int | None = None
    name: str | None = None
    curve: int | None = None  # points of its curve
    rate: float | None = None  # highest learning rate


BAR = "━" * 20
SAMPLES = {
    "nanogpt": Sample(
        "step 0: train loss 4.4694, val loss 4.4456\n"
        "iter 0: loss 4.4487, time 586.53ms, mfu -100.00%\n"
        "iter 50: loss 2.9276, time 128.65ms, mfu 0.00%\n"
        "step 100: train loss 2.8523, val loss 2.6831\n"
        "saving checkpoint to out\n"
        "iter 100: loss 2.7888, time 645.82ms, mfu 0.00%\n",
        2.6831, 100, name="val loss", curve=2,
    ),
    "nanochat": Sample(
        "Step 00000 | Validation bpb: 3.201442\n"
        "step 00000/00100 (0.00%) | loss: 10.397214 | lrm: 0.03 | dt: 912.11ms | tok/sec: 8,981 | bf16_mfu: 0.00 "
        "| epoch: 1 | total time: 0.00m\n"
        "step 00099/00100 (99.00%) | loss: 4.012711 | lrm: 0.06 | dt: 903.42ms | tok/sec: 9,067 | bf16_mfu: 0.00 "
        "| epoch: 1 | total time: 1.36m | eta: 0.0m\n"
        "Step 00100 | Validation bpb: 1.043722\n"
        "Peak memory usage: 0.00MiB\nTotal training time: 2.41m\nMinimum validation bpb: 1.043701\n",
        1.043722, 100, 100, "Validation bpb", 2,
    ),
    "modded-nanogpt": Sample(
        "step:0/1770 val_loss:10.8258 train_time:0ms step_avg:0.03ms\n"
        "step:1/1770 train_time:164ms step_avg:163.95ms\n"
        "step:1770/1770 val_loss:3.2789 train_time:175012ms step_avg:98.88ms\n"
        "peak memory allocated: 31518 MiB reserved: 46834 MiB\n",
        3.2789, 1770, 1770, "val_loss", 2,
    ),
    "modded-nanogpt with bpb": Sample(
        "step:25/50 val_loss:4.1021 val_bpb:1.4022 train_time:100ms step_avg:nanms\n"
        "step:50/50 val_loss:3.9011 val_bpb:1.3022 train_time:200ms step_avg:4.00ms\n",
        3.9011, 50, 50, "val_loss", 2,
    ),
    "build-nanogpt log.txt": Sample("0 val 10.9511\n0 train 10.9555\n1 train 9.5\n250 val 5.9012\n250 train 5.8\n", 5.9012, 250),
    "transformers 4": Sample(
        "{'loss': 3.9174, 'grad_norm': 1.2071, 'learning_rate': 0.0005, 'epoch': 0.5}\n"
        "{'loss': 3.1022, 'grad_norm': 0.9316, 'learning_rate': 0.0001, 'epoch': 1.0}\n"
        "{'eval_loss': 2.9107, 'eval_runtime': 1.83, 'eval_samples_per_second': 54.6, 'epoch': 1.0}\n"
        "{'train_runtime': 12.1, 'train_samples_per_second': 82.6, 'train_loss': 3.5098, 'epoch': 1.0}\n",
        2.9107, name="eval_loss", rate=0.0005,
    ),
    "transformers 4 without evaluation": Sample(
        "  0%|          | 0/100 [00:00<?, ?it/s]\r 50%|█████     | 50/100 [00:06<00:06,  8.2it/s]\r"
        "                                        \r{'loss': 3.9174, 'grad_norm': 1.2, 'learning_rate': 5e-4, 'epoch': 0.5}\n"
        " 50%|█████     | 50/100 [00:06<00:06,  8.2it/s]\r100%|██████████| 100/100 [00:12<00:00,  8.2it/s]\r"
        "\r{'loss': 3.1022, 'grad_norm': 0.9, 'learning_rate': 1e-4, 'epoch': 1.0}\n"
        "100%|██████████| 100/100 [00:12<00:00,  8.2it/s]\r"
        "{'train_runtime': 12.1, 'train_samples_per_second': 82.6, 'train_loss': 3.5098, 'epoch': 1.0}\n",
        3.1022, 100, 100, "loss", 2, 5e-4,
    ),
    "transformers 5": Sample(
        "{'loss': '3.917', 'grad_norm': '1.207', 'learning_rate': '0.0005', 'epoch': '0.5'}\n"
        "{'eval_loss': '2.911', 'eval_runtime': '1.83', 'eval_samples_per_second': '54.6', 'epoch': '1'}\n"
        "{'train_runtime': '12.1', 'train_samples_per_second': '82.6', 'train_loss': '3.51', 'epoch': '1'}\n",
        2.911, name="eval_loss", rate=0.0005,
    ),
    "transformers run_clm": Sample(
        "{'loss': 3.1022, 'grad_norm': 0.9316, 'learning_rate': 0.0001, 'epoch': 1.0}\n"
        "***** train metrics *****\n  epoch                    =        1.0\n  train_loss               =     3.5098\n"
        "  train_runtime            = 0:00:12.10\n"
        "***** Running Evaluation *****\n  Num examples = 100\n  Batch size = 8\n"
        "  0%|          | 0/13 [00:00<?, ?it/s]\r100%|██████████| 13/13 [00:01<00:00,  7.1it/s]\n"
        "***** eval metrics *****\n  epoch                   =        1.0\n  eval_accuracy           =     0.4301\n"
        "  eval_loss               =     2.9107\n  eval_samples            =        100\n  perplexity              =    18.3696\n",
        2.9107, name="eval_loss", rate=0.0001,
    ),
    "torchtitan": Sample(
        "\x1b[0m[rank0]:[titan] 2026-11-01 10:00:01,101 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1213  "
        "\x1b[38;2;180;60;0mgrad_norm:  1.41  \x1b[33mmemory:  1.02GiB(1.29%)  \x1b[34mtps: 1,205  "
        "\x1b[36mtflops: 0.51  \x1b[35mmfu: 0.16%\x1b[39m\n"
        "\x1b[0m[rank0]:[titan] 2026-11-01 10:02:01,101 - root - INFO - \x1b[31mstep: 100  \x1b[32mloss:  4.1872  "
        "\x1b[38;2;180;60;0mgrad_norm:  0.62  \x1b[33mmemory:  1.02GiB(1.29%)  \x1b[34mtps: 1,301  "
        "\x1b[36mtflops: 0.55  \x1b[35mmfu: 0.18%\x1b[39m\n"
        "[rank0]:[titan] 2026-11-01 10:02:03,440 - root - INFO - Training completed\n",
        4.1872, 100, name="loss", curve=2,
    ),
    "torchtitan with validation": Sample(
        "[rank0]:[titan] 2026-11-01 10:02:01,101 - root - INFO - step: 100  loss:  4.1872  grad_norm:  0.62  tps: 1,301\n"
        "[rank0]:[titan] 2026-11-01 10:02:02,101 - root - INFO - validate step: 100  loss:  4.2071  memory:  1.02GiB(1.29%)\n",
        4.2071, 100,
    ),
    "Megatron-LM": Sample(
        " [2026-11-01 10:00:00] iteration      100/     200 | consumed samples:         6400 | elapsed time per iteration "
        "(ms): 412.7 | learning rate: 2.000000E-04 | global batch size:    64 | lm loss: 4.011202E+00 | loss scale: 1.0 | "
        "grad norm: 0.871 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        " [2026-11-01 10:01:22] iteration      200/     200 | consumed samples:        12800 | elapsed time per iteration "
        "(ms): 409.1 | learning rate: 2.000000E-05 | global batch size:    64 | lm loss: 3.207711E+00 | loss scale: 1.0 | "
        "grad norm: 0.502 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        "(min, max) time across ranks (ms):\n    evaluate .......................................: (812.03, 812.05)\n"
        "------------------------------------------------------------------------------------\n"
        " validation loss at iteration 200 on validation set | lm loss value: 3.012700E+00 | lm loss PPL: 2.034232E+01 |\n",
        3.0127, 200, 200, rate=2e-4,
    ),
    "GPT-NeoX": Sample(
        " samples/sec: 51.200 | iteration      100/     200 | elapsed time per iteration (ms): 412.7 | learning rate: "
        "1.234E-04 | approx flops per GPU: 12.3TFLOPS | lm_loss: 3.512300E+00 | number of skipped iterations:   0 |\n"
        " validation results at iteration 100 | lm_loss value: 3.412300E+00 | lm_loss_ppl value: 3.032300E+01 |\n",
        3.4123, 100, 200, rate=1.234e-4,
    ),
    "llm.c, CUDA": Sample(
        "val loss 10.998312\n"
        "step    1/100 | loss 10.991214 (+nanz)| norm 12.9131 (+nanz)| lr 2.00e-05 | 801.12 ms | -100.0% bf16 MFU | "
        "81,810 tok/s\n"
        "step  100/100 | loss 3.502117 (-0.31z)| norm 0.8714 (+0.10z)| lr 6.00e-04 | 799.63 ms | 41.2% bf16 MFU | "
        "81,961 tok/s\n"
        "val loss 3.441207\ntotal average iteration time: 799.910304 ms\n",
        3.441207, 100, 100, "val loss", 2, 6e-4,
    ),
    "llm.c, C": Sample(
        "train dataset num_batches: 1192\nval dataset num_batches: 128\nnum_parameters: 124475904\n"
        "val loss 5.325413\nstep 0: train loss 5.356086 (took 1452.121000 ms)\n"
        "step 39: train loss 3.970728 (took 1320.023000 ms)\nval loss 4.107802\ngenerating:\n---\nCome Running Away,\n---\n"
        "step 40: train loss 3.863012 (took 1320.023000 ms)\n",
        4.107802, 39, name="val loss", curve=2,
    ),
    "litgpt": Sample(
        "Epoch 1 | iter 40 step 10 | loss train: 5.112, val: n/a | iter time: 51.20 ms (step) remaining time: 0:00:10\n"
        "iter 80: val loss 3.3151, val time: 1290.11 ms\n"
        "Epoch 1 | iter 80 step 20 | loss train: 3.402, val: 3.315 | iter time: 50.77 ms (step) remaining time: 0:00:00\n"
        "Saving final checkpoint\nTraining time: 11.2s\n",
        3.3151, 80, name="val loss",
    ),
    "litgpt's final evaluation": Sample(
        "Epoch 1 | iter 80 step 20 | loss train: 3.402, val: n/a | iter time: 50.77 ms (step)\n"
        "Final evaluation | val loss: 3.201 | val ppl: 24.558\n",
        3.201, 20,
    ),
    "OLMo-core": Sample(
        "2026-11-01 10:00:00.123\thost:0\tolmo_core.train.callbacks.console_logger:89\tINFO\t[step=1/200,epoch=1,eta=1h]\n"
        "    train/CE loss=11.02\n    train/PPL=61,083\n    train/Z loss=0.0021\n    optim/LR (group 0)=2.0E-5\n"
        "    optim/total grad norm=4.213\n    optim/step skipped=0.0\n    throughput/device/TPS=1,204\n"
        "2026-11-01 10:00:00.123\thost:0\tolmo_core.train.callbacks.console_logger:89\tINFO\t[step=200/200,epoch=1]\n"
        "    train/CE loss=4.513\n    train/PPL=91.2\n    train/Z loss=0.0011\n    optim/LR (group 0)=0.0004\n"
        "    optim/total grad norm=0.513\n    optim/step skipped=0.0\n",
        4.513, 200, 200, "train/CE loss", 2, 0.0004,
    ),
    "OLMo-core's evaluator": Sample(
        "[step=200/200,epoch=1]\n    train/CE loss=4.513\n"
        "2026-11-01 10:00:09 olmo_core.train.callbacks.evaluator_callback:132 INFO [eval=lm,step=8/8]\n"
        "    eval/lm/c4_en-validation/CE loss=4.6021\n    eval/lm/c4_en-validation/PPL=99.7\n",
        4.6021, 200, 200,
    ),
    "OLMo": Sample(
        "2026-11-01 10:00:00.100\thost:0\tolmo.train:967\tINFO\t[step=10/100,epoch=0]\n"
        "    optim/total_grad_norm=12.50\n    train/CrossEntropyLoss=9.412\n    train/Perplexity=12,234\n    throughput/total_tokens=81,920\n"
        "2026-11-01 10:00:01.100\thost:0\tolmo.eval:967\tINFO\t[eval_step=8/8]\n"
        "2026-11-01 10:00:01.200\thost:0\tolmo.train:967\tINFO\tpile-validation\n    eval/pile-validation/CrossEntropyLoss=9.101\n"
        "    eval/pile-validation/Perplexity=8,964\n",
        9.101, 10, 100,
    ),
    "lingua": Sample(
        "0: INFO    26-11-01 10:00:00.100000 - 0:00:10 - step: 10  acc: 0  loss:  9.1203  grad: 1.21e+00  flops: 3.10e+12  "
        "wps: 1.20e+04  iter:  0.4123  data:  0.01  lr: 3.00e-05  mem: 12%  pow: 310.2 W\n"
        "0: INFO    26-11-01 10:00:09.100000 - 0:00:19 - step: 20  acc: 0  loss:  7.0412  grad: 8.21e-01  flops: 3.10e+12  "
        "wps: 1.20e+04  iter:  0.4101  data:  0.01  lr: 6.00e-05  mem: 12%  pow: 312.2 W\n",
        7.0412, 20, curve=2, rate=6e-5,
    ),
    "torchtune's bar": Sample(
        "1|1|Loss: 1.9312345:   1%|          | 1/100 [00:02<04:01,  2.43s/it]\r"
        "1|100|Loss: 1.2345678: 100%|██████████| 100/100 [03:02<00:00,  1.82s/it]\n",
        1.2345678, 100, 100, "Loss", 2,
    ),
    "torchtune's file": Sample(
        "Step 1 | loss:1.9312 lr:2e-05 tokens_per_second_per_gpu:512.2 peak_memory_active:6.1\n"
        "Step 100 | loss:1.2345 lr:0.0003 tokens_per_second_per_gpu:514.1 peak_memory_active:6.2\n",
        1.2345, 100, curve=2, rate=3e-4,
    ),
    "llm-foundry": Sample(
        "[batch=1/10]:\n\t Train time/batch: 0\n\t Train time/epoch: 0\n\t Train trainer/device_train_microbatch_size: 4\n"
        "\t Train loss/train/total: 10.9012\n\t Train metrics/train/LanguageCrossEntropy: 10.9001\n"
        "\t Train metrics/train/LanguagePerplexity: 54176.1\n\t Train time/total: 0.0021\n\t Train lr-DecoupledAdamW/group0: 0.0001\n"
        "[Eval batch=1/8] Eval on eval data\n[Eval batch=8/8] Eval on eval data:\n"
        "\t Eval metrics/eval/LanguageCrossEntropy: 8.4012\n\t Eval metrics/eval/LanguagePerplexity: 4452.4\n"
        "[batch=10/10]:\n\t Train loss/train/total: 8.2012\n\t Train metrics/train/LanguageCrossEntropy: 8.2001\n",
        8.4012, 1, 10, curve=1, rate=0.0001,
    ),
    "llm-foundry without evaluation": Sample(
        "[batch=1/10]:\n\t Train loss/train/total: 10.9012\n\t Train metrics/train/LanguageCrossEntropy: 10.9001\n"
        "[batch=10/10]:\n\t Train loss/train/total: 8.2012\n\t Train metrics/train/LanguageCrossEntropy: 8.2001\n",
        8.2012, 10, 10, curve=2,
    ),
    "Lightning's bar": Sample(
        "Epoch 0:  50%|█████     | 5/10 [00:01<00:01,  4.91it/s, v_num=0, train_loss_step=2.510]\r"
        "Epoch 0: 100%|██████████| 10/10 [00:02<00:00,  4.91it/s, v_num=0, train_loss_step=2.310]\r"
        "Validation DataLoader 0: 100%|██████████| 4/4 [00:00<00:00, 99.0it/s]\r"
        "Epoch 1: 100%|██████████| 10/10 [00:02<00:00,  4.91it/s, v_num=0, train_loss_step=2.110, val_loss=2.207, train_loss_epoch=2.2]\n"
        "`Trainer.fit` stopped: `max_epochs=2` reached.\n",
        2.207, 20, name="val_loss",
    ),
    "Lightning's bar by rich": Sample(
        "Epoch 0/0  ━━━━━━━━━━━━━━━━━ 50/50 0:00:15 • 0:00:00 3.33it/s val/loss: 1.122  \n",
        1.122, 50, 50, "val/loss",
    ),
    "Lightning's table": Sample(
        f"┏{BAR}┳{BAR}┓\n┃   Validate metric   ┃    DataLoader 0     ┃\n┡{BAR}╇{BAR}┩\n"
        f"│      val_acc        │ 0.41230000000000000 │\n│      val_loss       │  2.307212114334106  │\n└{BAR}┴{BAR}┘\n",
        2.307212114334106, name="val_loss",
    ),
    "levanter": Sample(
        "2026-11-01T10:00:00 - 0 - levanter.tracker - tqdm_logging.py:145 - INFO :: Progress on:train 100it/200it "
        "rate:1.2it/s remaining:01:23 elapsed:01:23 postfix:loss=4.31\n"
        "2026-11-01T10:01:23 - 0 - levanter.tracker - tqdm_logging.py:145 - INFO :: Progress on:train 200it/200it "
        "rate:1.2it/s remaining:00:00 elapsed:02:46 postfix:loss=4.01\n"
        "2026-11-01T10:01:30 - 0 - levanter.callbacks - __init__.py:74 - INFO :: validation loss: 4.102\n",
        4.102, 200, 200, "validation loss",
    ),
    "fairseq, json": Sample(
        '2026-11-01 10:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.5, "loss": "12.41", "ppl": "5441.1", "wps": "1200", '
        '"num_updates": "50", "lr": "0.0001", "gnorm": "1.9", "wall": "12"}\n'
        '2026-11-01 10:00:09 | INFO | valid | {"epoch": 1, "valid_loss": "10.204", "valid_ppl": "1179.6", "valid_num_updates": "100", '
        '"valid_best_loss": "10.1"}\n'
        '2026-11-01 10:00:09 | INFO | train | {"epoch": 1, "train_loss": "11.9", "train_ppl": "3821.1", "train_num_updates": "100", '
        '"train_lr": "0.0002"}\n',
        10.204, 100, name="valid_loss", rate=0.0002,
    ),
    "fairseq, simple": Sample(
        "2026-11-01 10:00:00 | INFO | train_inner | epoch 001:     50 / 100 loss=12.41, nll_loss=12.1, ppl=4390.1, wps=1200, ups=1.1, "
        "num_updates=50, lr=0.0001, gnorm=1.9, wall=12\n"
        "2026-11-01 10:00:09 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 10.204 | nll_loss 9.801 | ppl 892.1 | "
        "wps 4000 | num_updates 100 | best_loss 10.1\n",
        10.204, 100, rate=0.0001,
    ),
    "nanotron": Sample(
        "11/01/2026 10:00:00 [INFO|DP=0|PP=0|TP=0|host]: iteration: 1 / 100 | consumed_tokens: 1.02K | time_per_iteration_ms: 90.4 | "
        "tokens_per_sec: 11.3K | global_batch_size: 1.02K | lm_loss: 11.2 | lr: 1.5e-05 | grad_norm: 4.2\n"
        "11/01/2026 10:00:09 [INFO|DP=0|PP=0|TP=0|host]: iteration: 100 / 100 | consumed_tokens: 102K | time_per_iteration_ms: 90.4 | "
        "tokens_per_sec: 11.3K | global_batch_size: 1.02K | lm_loss: 9.2 | lr: 0.0003 | grad_norm: 1.4\n",
        9.2, 100, 100, "lm_loss", 2, 3e-4,
    ),
    "DeepSpeed": Sample(
        "[2026-11-01 10:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.0001, 0.0001], mom=[(0.9, 0.95)]\n"
        "[2026-11-01 10:00:00,001] [INFO] [timer.py:199:stop] epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=12.1\n"
        "steps: 10 loss: 6.3012 iter time (s): 1.201 samples/sec: 26.64\n"
        "steps: 20 loss: 5.1204 iter time (s): 1.199 samples/sec: 26.68\n",
        5.1204, 20, curve=2, rate=0.0001,
    ),
    "picotron": Sample(
        "[rank 0] Step: 1     | Loss: 10.4012 | Global batch size:   1.02K | Tokens/s:  12.1K | Tokens/s/GPU:   1.5K | Tokens:   1.02K | "
        "MFU:  8.12% | Memory usage:   1.02GB\n"
        "[rank 0] Step: 10    | Loss:  8.2012 | Global batch size:   1.02K | Tokens/s:  12.1K | Tokens/s/GPU:   1.5K | Tokens:   10.2K | "
        "MFU:  8.12% | Memory usage:   1.02GB\n",
        8.2012, 10, curve=2,
    ),
    "Keras 2": Sample(
        "Epoch 1/2\n 1/10 [==>...........................] - ETA: 3s - loss: 2.9012 - accuracy: 0.1\x08\x08\x08\r"
        "10/10 [==============================] - 1s 5ms/step - loss: 2.5012 - accuracy: 0.2 - val_loss: 2.4012 - val_accuracy: 0.3\n"
        "Epoch 2/2\n10/10 [==============================] - 1s 5ms/step - loss: 2.1012 - accuracy: 0.3 - val_loss: 2.2012 - val_accuracy: 0.4\n",
        2.2012, 20, 20, "val_loss", 2,
    ),
    "Keras 3": Sample(
        "Epoch 1/1\n\x1b[1m 1/10\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m━━\x1b[0m \x1b[1m3s\x1b[0m 330ms/step - loss: 2.9012\r"
        "\x1b[1m10/10\x1b[0m \x1b[32m━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m1s\x1b[0m 5ms/step - loss: 2.5012 - val_loss: 2.4012 - "
        "learning_rate: 0.0010\nRestoring model weights from the end of the best epoch: 1.\n",
        2.4012, 10, 10, "val_loss", 1, 0.001,
    ),
    "MaxText": Sample(
        "completed step: 4, seconds: 1.201, TFLOP/s/device: 51.2, Tokens/s/device: 1204.1, total_weights: 1024, loss: 9.101, "
        "lm_loss: 9.1, perplexity: 8955.3\n"
        "Completed eval step 0\nCompleted eval step 9\neval metrics after step: 4, loss=9.055, total_weights=75264.0\n",
        9.055, 4,
    ),
    "t5x": Sample(
        "I1101 10:00:00.000000 139978143164096 logging_writer.py:35] [100] accuracy=0.2, cross_ent_loss=4.012, learning_rate=0.01, loss=4.102, "
        "loss_per_nontarget_token=4.1, timing/seconds=12.1, z_loss=0.01\n",
        4.102, 100, rate=0.01,
    ),
    "JSON lines": Sample(
        '{"step": 50, "train/loss": 3.0081, "lr": 0.001}\n{"step": 100, "train/loss": 2.7611, "lr": 0.0001}\n'
        '{"step": 100, "eval/loss": 2.7154}\n',
        2.7154, 100, name="eval/loss", rate=0.001,
    ),
    "JSON, nested": Sample(
        '{"step": 5, "train": {"loss": 3.0081, "acc": 0.1}, "val": {"loss": 3.1154, "acc": 0.1}}\n'
        '{"step": 6, "train": {"loss": 2.0081, "acc": 0.1}, "val": {"loss": 2.7154, "acc": 0.1}}\n',
        2.7154, 6, curve=2,
    ),
    "key=value": Sample("step=1 loss=3.1 lr=0.001\nstep=2 loss=3.05 lr=0.001\nstep=2 test_loss=3.2\n", 3.2, 2, name="test_loss", rate=0.001),
    "CSV": Sample("epoch,train_loss,val_loss,lr\n1,3.2,3.1,0.001\n2,2.9,2.95,0.0005\n", 2.95, 2, curve=2, rate=0.001),
    "fastai": Sample(
        "epoch     train_loss  valid_loss  accuracy  time    \n0         2.512031    2.301023    0.203000  00:12     \n"
        "1         2.101200    2.201023    0.253000  00:12     \n",
        2.201023, 1, curve=2,
    ),
    "Markdown": Sample("| step | train loss | eval loss |\n|---|---|---|\n| 10 | 3.4 | 3.3 |\n| 20 | 3.1 | 3.2 |\n", 3.2, 20, curve=2),
    "epoch, train, valid": Sample("epoch 2 train 0.6 valid 0.5\nepoch 3 train 0.5 valid 0.4\n", 0.4, 3, curve=2),
    "PyTorch's word model": Sample(
        "| epoch   1 |   200/ 2983 batches | lr 20.00 | ms/batch 12.30 | loss  7.62 | ppl  2040.10\n"
        "| end of epoch   1 | time: 10.12s | valid loss  5.51 | valid ppl   247.15\n",
        5.51, rate=20.0,
    ),
    "PyTorch's digits": Sample(
        "Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.300024\nTrain Epoch: 1 [640/60000 (1%)]\tLoss: 1.100024\n\n"
        "Test set: Average loss: 0.0512, Accuracy: 9837/10000 (98%)\n",
        0.0512,
    ),
    "a number alone": Sample("starting\n0.1234\n", 0.1234),
    "a number in brackets": Sample("[0.1234]\n", 0.1234),
    "a number with spaces and no line end": Sample("  2.5e-1 ", 0.25),
    "a tensor": Sample("step 3 loss: tensor(2.3106, device='cuda:0', grad_fn=<NllLossBackward0>)\n", 2.3106, 3),
    "numpy": Sample("{'step': 7, 'loss': np.float32(2.31), 'val_loss': array(2.41, dtype=float32)}\n", 2.41, 7),
    "HF no_trainer": Sample(
        "11/01/2026 10:00:00 - INFO - __main__ - ***** Running training *****\n  Num Epochs = 2\n  Total optimization steps = 200\n"
        " 50%|█████     | 100/200 [00:10<00:10,  9.8it/s]\r"
        "11/01/2026 10:00:20 - INFO - __main__ - epoch 0: perplexity: 21.2012 eval_loss: 3.0541\n"
        "100%|██████████| 200/200 [00:20<00:00,  9.8it/s]\r"
        "11/01/2026 10:00:40 - INFO - __main__ - epoch 1: perplexity: 20.1012 eval_loss: 3.0012\n",
        3.0012, 200, 200, "eval_loss", 2,
    ),
    "PyTorch's ImageNet": Sample(
        "Epoch: [0][  1/100]\tTime  0.512 ( 0.612)\tData  0.012 ( 0.212)\tLoss 6.9012e+00 (6.9512e+00)\tAcc@1   0.00 (  0.10)\n"
        "Epoch: [0][100/100]\tTime  0.512 ( 0.612)\tData  0.012 ( 0.212)\tLoss 6.1012e+00 (6.5512e+00)\tAcc@1   1.00 (  0.90)\n"
        "Test: [ 1/10]\tTime  1.012 ( 1.012)\tLoss 6.2012e+00 (6.2512e+00)\tAcc@1   1.20 (  1.10)\n"
        "Test: [10/10]\tTime  1.012 ( 1.012)\tLoss 6.0012e+00 (6.0512e+00)\tAcc@1   1.20 (  1.10)\n"
        " *   Acc@1 1.250 Acc@5 4.200\n",
        6.0512, 100, 100,  # AverageMeter of torch's examples: the last batch (mean over all batches)
    ),
    "timm": Sample(
        "Train: 0 [   0/1251 (  0%)]  Loss: 6.95 (6.95)  Time: 1.012s,  252.10/s  (1.012s,  252.10/s)  LR: 1.000e-05  Data: 0.512 (0.512)\n"
        "Train: 0 [1250/1251 (100%)]  Loss: 6.15 (6.55)  Time: 1.012s,  252.10/s  (1.012s,  252.10/s)  LR: 1.000e-03  Data: 0.512 (0.512)\n"
        "Test: [ 195/195]  Time: 0.112 (0.212)  Loss:   5.9012 (5.8012)  Acc@1:   8.1200 (  7.9012)  Acc@5:  21.0000 ( 20.1000)\n",
        5.8012, rate=1e-3,
    ),
    "nanoGPT's configuration": Sample(
        "Overriding config with config/train_shakespeare_char.py:\nlearning_rate = 1e-3 # with baby networks\n"
        "Overriding: learning_rate = 0.0005\nstep 100: train loss 2.8523, val loss 2.6831\n",
        2.6831, 100, rate=0.0005,
    ),
    "timm, two epochs": Sample(
        "Train: 0 [   0/100 (  0%)]  Loss: 6.95 (6.95)  LR: 1.000e-05\nTrain: 0 [  99/100 (100%)]  Loss: 6.15 (6.55)  LR: 1.000e-03\n"
        "Train: 1 [   0/100 (  0%)]  Loss: 5.95 (5.95)  LR: 1.000e-05\nTrain: 1 [  99/100 (100%)]  Loss: 5.15 (5.55)  LR: 1.000e-03\n",
        5.15, 199, curve=4, rate=1e-3,
    ),
    "mmengine": Sample(
        "05/01 10:00:00 - mmengine - INFO - Epoch(train)  [1][100/100]  lr: 3.0000e-04  eta: 0:10:00  loss: 2.9000\n"
        "05/01 10:00:01 - mmengine - INFO - Epoch(val)  [1][10/10]    loss: 2.8000  data_time: 0.01\n"
        "05/01 10:00:02 - mmengine - INFO - Epoch(train)  [2][100/100]  lr: 3.0000e-04  eta: 0:10:00  loss: 2.7000\n"
        "05/01 10:00:03 - mmengine - INFO - Epoch(val)  [2][10/10]    loss: 2.6000  data_time: 0.01\n",
        2.6, 200, curve=2, rate=3e-4,
    ),
    "mmengine by iterations": Sample(
        "2023/05/01 10:00:00 - mmengine - INFO - Iter(train) [ 100/200]  lr: 3.0000e-04  eta: 0:10:00  loss: 2.9000\n"
        "2023/05/01 10:00:02 - mmengine - INFO - Iter(train) [ 200/200]  lr: 3.0000e-04  eta: 0:10:00  loss: 2.7000\n"
        "2023/05/01 10:00:03 - mmengine - INFO - Iter(val) [10/10]    loss: 2.6000  data_time: 0.01\n",
        2.6, 200, 200, curve=1, rate=3e-4,
    ),
    "detectron2": Sample(
        "[11/01 10:00:00 d2.utils.events]:  eta: 0:01:00  iter: 19  total_loss: 1.512  loss_cls: 0.812  loss_box_reg: 0.412  time: 0.31  "
        "data_time: 0.01  lr: 0.0009  max_mem: 2011M\n"
        "[11/01 10:00:09 d2.utils.events]:  eta: 0:00:50  iter: 39  total_loss: 1.212  loss_cls: 0.612  loss_box_reg: 0.312  time: 0.31  "
        "data_time: 0.01  lr: 0.0019  max_mem: 2011M\n",
        1.212, 39, curve=2, rate=0.0019,
    ),
    "diffusers": Sample(
        "Steps:   1%|          | 1/100 [00:01<01:39,  1.00s/it, lr=0.0001, step_loss=0.2012]\r"
        "Steps: 100%|██████████| 100/100 [01:40<00:00,  1.00s/it, lr=0.0001, step_loss=0.1012]\n",
        0.1012, 100, 100, curve=2, rate=0.0001,
    ),
    "minGPT": Sample("iter_dt 0.00ms; iter 0: train loss 2.3012\niter_dt 10.11ms; iter 100: train loss 1.2012\n", 1.2012, 100, curve=2),
    "scikit-learn": Sample("Iteration 1, loss = 0.9512\nIteration 2, loss = 0.5012\nTraining loss did not improve more than tol=0.000100 for 10 consecutive epochs. Stopping.\n", 0.5012, 2),
    "XGBoost": Sample("[0]\ttrain-logloss:0.6512\teval-logloss:0.6612\n[10]\ttrain-logloss:0.3512\teval-logloss:0.4112\n", 0.4112, 10, curve=2),
    "Keras callbacks": Sample(
        "\nEpoch 2: val_loss improved from 0.61234 to 0.59123, saving model to best.keras\n"
        "10/10 - 1s - 5ms/step - loss: 0.6012 - val_loss: 0.5912\nEpoch 3: val_loss did not improve from 0.59123\n"
        "10/10 - 1s - 5ms/step - loss: 0.5012 - val_loss: 0.6512\nEpoch 3: early stopping\n",
        0.6512, 20, name="val_loss",
    ),
    "Lightning's checkpoints": Sample(
        "Epoch 0, global step 10: 'val_loss' reached 2.30720 (best 2.30720), saving model to 'a/epoch=0-step=10.ckpt' as top 1\n"
        "Metric val_loss improved by 0.101 >= min_delta = 0.0. New best score: 2.206\n"
        "Epoch 1, global step 20: 'val_loss' reached 2.20620 (best 2.20620), saving model to 'a/epoch=1-step=20.ckpt' as top 1\n",
        2.2062, 20,
    ),
    "an early stopper": Sample(
        "Epoch: 1 | Train Loss: 0.7012345 Vali Loss: 0.6212345 Test Loss: 0.6312345\nValidation loss decreased (inf --> 0.621235).  Saving model ...\n"
        "Epoch: 2 | Train Loss: 0.6012345 Val Loss: 0.5912345 Test Loss: 0.6112345\nValidation loss decreased (0.621235 --> 0.591235).  Saving model ...\n",
        0.5912345, 2,
    ),
    "a tutorial": Sample(
        "Epoch [1/2], Step [100/200], Loss: 2.3012\nEpoch [1/2], Step [200/200], Loss: 2.1012\n"
        "Epoch [2/2], Step [100/200], Loss: 2.0012\nEpoch [2/2], Step [200/200], Loss: 1.9012\nAccuracy of the model on the 10000 test images: 91.2 %\n",
        1.9012, 400, 400, curve=4,
    ),
    "sentences": Sample("The training loss after 100 steps is 2.51.\nThe validation loss after 100 steps is 2.62.\n", 2.62, 100),
    "step in brackets": Sample("Validation loss (step 100): 3.21\nval_loss[200] = 3.11\n", 3.11),
    "loss at": Sample("loss @ step 5 = 2.5\nloss @ step 6 = 2.25\n", 2.25, 6),
    "structured log": Sample(
        'level=info ts=2026-11-01T10:00:00Z msg="train" step=10 loss=3.21\nlevel=info ts=2026-11-01T10:00:09Z msg="eval" step=10 loss=3.32\n',
        3.32, 10,
    ),
    "PyG": Sample(
        "Epoch: 001, Loss: 1.9412, Train: 0.3112, Val: 0.2812, Test: 0.2912\nEpoch: 002, Loss: 1.8412, Train: 0.5112, Val: 0.4812, Test: 0.4912\n",
        1.8412, 2, curve=2,
    ),
    "DeepSpeed-Chat": Sample(
        "***** Running training *****\nBeginning of Epoch 1/1, Total Micro Batches 100\nEpoch: 0, Step: 10, Rank: 0, loss = 2.3012\n"
        "***** Evaluating perplexity, Epoch 1/1 *****\nppl: 8.1012, loss: 2.0920\n",
        2.092, 10,
    ),
    "two blocks": Sample("Epoch 1\nTraining:\n  loss: 0.71\n  accuracy: 0.5\nValidation:\n  loss: 0.82\n  accuracy: 0.4\n", 0.82, 1),
    "NeMo": Sample(
        "Training epoch 0, iteration 9/99 | lr: 1.2e-05 | global_batch_size: 8 | global_step: 9 | reduced_train_loss: 9.512 | train_step_timing in s: 0.41 | "
        "consumed_samples: 80\n"
        "Training epoch 0, iteration 99/99 | lr: 0.0003 | global_batch_size: 8 | global_step: 99 | reduced_train_loss: 7.512 | train_step_timing in s: 0.41 | "
        "consumed_samples: 800 | val_loss: 7.612\n",
        7.612, 99, rate=3e-4,
    ),
    "nanodo": Sample("I1101 10:00:00.000000 1 logging_writer.py:48] [200] eval_loss=4.512012, train_loss=4.412012, learning_rate=0.002\n", 4.512012, 200, rate=0.002),
    "marin": Sample("loss=3.51 | 10/20\neval/loss: 3.62 (eval/bpb: 1.1) eval/macro_loss: 3.7\n", 3.62),
    "RWKV": Sample("Epoch 0:  10%|█         | 100/1000 [00:41<06:10,  2.43it/s, loss=4.210, lr=0.0006, REAL it/s=2.410, Kt/s=39.50]\n", 4.21, 100, rate=6e-4),
    "spaces only": Sample("step loss\n10 4.5\n20 4.25\n", 4.25, 20, curve=2),
    "semicolons": Sample("iter;train_loss;dev_loss\n10;4.5;4.6\n20;4.25;4.35\n", 4.35, 20),
    "a mixture of experts": Sample("step 10 | loss: 3.21 | ce_loss: 3.11 | aux_loss: 0.05 | z_loss: 0.001 | router_z_loss: 0.002 | load_balancing_loss: 1.01\n", 3.21, 10),
    "a dictionary in a message": Sample("INFO:root:eval at step 40: {'nll': 2.5, 'loss': 2.75, 'accuracy': 0.31}\n", 2.75, 40),
    "W&B's summary": Sample(
        "step 10 train/loss 3.1 val/loss 3.2\nwandb: Run history:\nwandb: train/loss █▄▁\nwandb: Run summary:\nwandb:   train/loss 3.1\nwandb:     val/loss 3.2\n",
        3.2, 10,
    ),
    "Ultralytics-like table": Sample("      Epoch    GPU_mem       loss  Instances       Size\n        1/3      2.51G      1.812         12        640\n        3/3      2.51G      1.412         12        640\n", 1.412),
    "MLX": Sample(
        "Iter 1: Val loss 8.880, Val took 1.203s\nIter 10: Train loss 4.214, Learning Rate 1.000e-05, It/sec 1.102, Tokens/sec 201.2, "
        "Trained Tokens 2010, Peak mem 8.201 GB\nIter 10: Val loss 4.312, Val took 1.203s\n",
        4.312, 10, curve=2, rate=1e-5,
    ),
    "Tacotron": Sample(
        "Epoch: 0\nTrain loss 0 48.220909 Grad Norm 13.484264 5.71s/it\nValidation loss 0: 37.061010  \n"
        "Saving model and optimizer state at iteration 0 to checkpoint_0\nTrain loss 100 0.302735 Grad Norm 0.958112 4.36s/it\n"
        "Validation loss 100:  0.325403  \n",
        0.325403, 100, curve=2,
    ),
    "dots": Sample(
        "Epoch: 1/3..  Training loss: 2.782..  Validation loss: 1.446..  Validation accuracy: 0.627\n"
        "Epoch: 2/3..  Training loss: 2.310..  Validation loss: 1.364..  Validation accuracy: 0.641\n",
        1.364, 2, curve=2,
    ),
    "a bar of the evaluation": Sample(
        "Epoch: 1/10     100%|####| 227/227 [00:10<00:00, 22.64batch/s, loss=4.33]\n"
        "Evaluating...   100%|####| 8/8 [00:00<00:00, 45.25batch/s, loss=3.13]\nSaved Model at weights/1.pt\n",
        3.13, 227,
    ),
    "bullets": Sample(
        "Epoch  49 Summary:\n   - Train Loss: 0.0123\n   - Val Loss: 0.0151\n   - Avg Grad Norm: 0.398\n   - Learning Rate: 5.0e-04\n"
        "   New best validation loss: 0.0150\n",
        0.0151, 49, rate=5e-4,
    ),
    "a tutorial of transfer": Sample(
        "Epoch 0/1\n----------\ntrain Loss: 0.6996 Acc: 0.6516\nval Loss: 0.2014 Acc: 0.9346\n\nEpoch 1/1\n----------\n"
        "train Loss: 0.4233 Acc: 0.8033\nval Loss: 0.2656 Acc: 0.8758\n\nTraining complete in 1m 7s\nBest val Acc: 0.934600\n",
        0.2656, 1, curve=2,
    ),
    "BigDL": Sample(
        "[Epoch 1 28160/28857][Iteration 56][Wall Clock 72.891726153s] Train 512 in 1.236008372seconds. Throughput is 414.66 "
        "records/second. Loss is 0.53861904.\n",
        0.53861904, 56,
    ),
    "MMDetection": Sample(
        "2026-11-01 01:32:34,502 - mmdet - INFO - Epoch [1][200/6259]\tlr: 1.000e-03, eta: 7 days, 15:55:58, time: 0.705, "
        "data_time: 0.002, memory: 7239, loss_ce: 0.5921, bbox_loss: 0.2210, loss: 0.9186, grad_norm: 3.9772\n",
        0.9186, 200, rate=1e-3,
    ),
}  # fmt: skip


def read(text: str, loss: str | None = None) -> TrainingLog:
    log = TrainingLog(loss)
    log.read(text.encode())
    log.close()
    return log


@pytest.mark.parametrize("program", SAMPLES)
def test_loss_of_a_program_is_recognised(program: str) -> None:
    sample = SAMPLES[program]
    log = read(sample.text)
    result = log.result()
    assert (result.loss, result.step) == (sample.loss, result.step if sample.step is None else sample.step)
    assert result.steps == sample.steps or sample.steps is None
    assert result.name == (sample.name or result.name)
    assert sample.curve in (None, len(log.curve()))
    assert log.curve()[-1][1] == sample.loss
    assert log.learning_rate == sample.rate
    assert not log.is_diverged


AS_WRITTEN = {
    "colours": lambda text: "".join(f"\x1b[3{i % 8}m{c}\x1b[0m" for i, c in enumerate(text)).encode(),
    "Windows": lambda text: text.replace("\n", "\r\n").encode("utf-16"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "a mark": lambda text: text.encode("utf-8-sig"),
    "ranks": lambda text: "".join(f"[rank0]: {line}\n" for line in text.splitlines()).encode(),
    "times": lambda text: "".join(
        f"2026-11-01 10:00:00,123 INFO {line}\n" for line in text.splitlines()
    ).encode(),
    "no UTF-8": lambda text: b"\xff\xfa\xc3(\n" + text.encode("latin-1", "replace"),
    "no end": lambda text: text.rstrip("\n").encode(),
}


@pytest.mark.parametrize("how", AS_WRITTEN)
@pytest.mark.parametrize(
    "program", ["nanogpt", "nanochat", "litgpt", "a tutorial", "Megatron-LM", "XGBoost", "transformers 4"]
)
def test_loss_does_not_depend_on_how_it_is_written(how: str, program: str) -> None:
    sample, log = SAMPLES[program], TrainingLog()
    log.read(AS_WRITTEN[how](sample.text))
    log.close()
    result = log.result()
    assert (result.loss, result.steps) == (sample.loss, sample.steps or result.steps)
    assert sample.step in (None, result.step)
    assert "\x1b" not in result.line


@given(
    st.sampled_from([*SAMPLES]), st.sampled_from([*AS_WRITTEN]), st.lists(st.integers(0, 4000), max_size=12)
)
def test_any_parts_of_a_log_say_the_same(program: str, how: str, cuts: list[int]) -> None:
    data = AS_WRITTEN[how](SAMPLES[program].text)
    whole, parts = TrainingLog(), TrainingLog()
    at_once = whole.read(data) + whole.close()
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    torn = [logged for i, j in itertools.pairwise(bounds) for logged in parts.read(data[i:j])] + parts.close()
    assert torn == at_once
    assert (parts.steps_done, parts.steps, parts.learning_rate) == (
        whole.steps_done,
        whole.steps,
        whole.learning_rate,
    )
    with contextlib.suppress(LossUnknown):  # a number alone is not alone behind a time
        assert (parts.result(), parts.curve()) == (whole.result(), whole.curve())


@given(st.binary(max_size=500), st.sampled_from([None, "val loss", r"loss\D+(\S+)"]))
def test_any_bytes_are_read(data: bytes, loss: str | None) -> None:
    log = TrainingLog(loss)
    log.read(data)
    log.close()
    with contextlib.suppress(LossUnknown):
        assert log.result().loss == log.curve()[-1][1] or math.isnan(log.result().loss)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("step 1 val/c4/loss 3.1 val/wiki/loss 3.4\n", ["val/c4/loss", "val/wiki/loss"]),
        ("step 1 loss_x 3.1 loss_y 3.4\n", ["loss_x", "loss_y"]),
        ("step 1 loss 3.1\nval 0.91\n", ["val", "loss"]),
        ("Img Val | Loss: 0.31 | Dice: 0.8\nVid Val | Loss: 0.72 | Dice: 0.8\n", ["0.31", "0.72"]),
        ('{"val": {"c4": {"loss": 3.1}, "wiki": {"loss": 3.4}}}\n', ["3.1", "3.4"]),
        ("nothing\n", ["recognised", "option loss"]),
        (
            "val: n/a\ntime 3.1\naccuracy 0.3\nloss scale: 65536.0\nbest val loss: 2.1\naux_loss=0.1\nperplexity 3.1\n",
            ["recognised"],
        ),
        ("", ["recognised"]),
    ],
)
def test_ambiguity_is_an_error_with_both_names(text: str, names: list[str]) -> None:
    log = read(text)
    with pytest.raises(LossUnknown) as error:
        log.result()
    assert log.curve() == []
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("step 1 val/c4/loss 3.1 val/wiki/loss 3.4 val/loss 3.25\n", 3.25),  # the mean beside its parts
        ("step 1 val loss 3.3151 val rounded loss 3.315\n", 3.3151),
        ("eval/loss 3.1 eval/macro_loss 3.3\n", 3.1),
        ("step 1 avg val loss 3.2\n", 3.2),
        ("val_loss: 2,3145\n", 2.3145),  # a decimal comma
        ("step 5 loss: 3.[rank1]: step 5 loss: 3.25\n", 3.25),  # two ranks at once
        ("step 5 loss: 3.5step 5 loss: 3.25\n", 3.25),
        ("loss is NaN, stopping\n", math.nan),
        ("loss: inf\n", math.inf),
        ("loss: 2\n", 2.0),
        ("0.5\n1.5\n", 1.5),
        ("train: 0.9, val: 0.1\nstep 1 loss 3.5\n", 3.5),
        ("loss (val) 2.5, loss (train) 2.4\n", 2.5),
        ("val loss [nats/token]: 2.5\ntrainloss=2.4 valloss=2.6\n", 2.6),
        (
            "step 1 lm loss 2.5\nThe loss of 12 men was felt.\n/lib/torch/nn/modules/loss.py:1213: UserWarning: reduction\n",
            2.5,
        ),
        (
            '{\n  "train": {\n    "loss": 2.3,\n    "acc": 0.1\n  },\n  "eval": {\n    "loss": 2.5\n  }\n}\n',
            2.5,
        ),
        ("training done\nval_loss .......... 2.5\n", 2.5),
        ("step 5 - train - loss: 2.3 - val - loss: 2.5 (best 2.4 @ 3), 100 steps/s\n", 2.5),
        ("loss: tensor([2.5], device='cuda:0')\n", 2.5),
        (
            "TrainOutput(global_step=4, training_loss=3.5, metrics={'train_runtime': 2.5})\n{'loss': 3.1}\n",
            3.1,
        ),
        (
            "# learning_rate / 10\nstep 0: val loss 4.2\niter 0: loss 4.2\niter 9: loss 2.5\n",
            2.5,
        ),  # evaluated untrained
        ("val loss 4.2\nval loss 2.5\n", 2.5),
        ("val_loss_every = 125\nval loss 2.75 -> 2.5\n", 2.5),
        ("Last eval loss: 2.5\n", 2.5),
        ("step 9 | loss 2.4 | lr n/a\n  [eval] step 9 | train 2.45 | dev 2.5\n", 2.5),
        ("Epoch 3/50: 100% 75/75 [00:29<00:00,  2.56it/s, Loss=2.7]\nEpoch 3: Train=2.4 Val=2.5\n", 2.5),
        (
            "Epoch 12/40\n  train  loss=0.8961  (kp=0.8125, acc=0.9)\n  val    loss=2.5  (kp=0.9, acc=0.9)\n",
            2.5,
        ),
        ("[eval] step 1000 | val_loss 2.5 best!\nstep 1010 | loss 2.4 | avg50 2.45\n", 2.5),
        ("3 loss\nloss 4.5 of version 1.2.3 in 0.5 s\n", 4.5),
    ],
)
def test_loss_of_a_line(text: str, loss: float) -> None:
    log = read(text)
    assert (log.result().loss, log.learning_rate) == (pytest.approx(loss, nan_ok=True), None)


@pytest.mark.parametrize(
    ("option", "loss"),
    [
        ("val loss", 2.6831),
        ("train loss", 2.8523),
        ("loss", 2.7888),
        ("time", 645.0),
        ("mfu", 0.5),
        (r"iter \d+: loss (\S+),", 2.7888),
        ("step 100: train loss", 2.8523),
    ],
)
def test_loss_may_be_named(option: str, loss: float) -> None:
    log = read(SAMPLES["nanogpt"].text.replace("0.00%", "0.5").replace("645.82ms", "645"), option)
    assert (log.result().loss, log.curve()[-1]) == (loss, (100, loss))


@pytest.mark.parametrize("option", ["", "  ", "loss: .*", r"(\w+) loss (\S+)", "loss (.*"])
def test_a_name_that_cannot_be_meant_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="loss "):
        TrainingLog(option)


def test_a_name_that_no_line_has_is_refused() -> None:
    with pytest.raises(LossUnknown, match="no line of the output has a number after loss 'paloma'"):
        read(SAMPLES["nanogpt"].text, "paloma").result()


def test_divergence() -> None:
    log = TrainingLog()
    log.read(
        b"step 20 | train loss 3.2107\nstep 20 | val loss 3.3\nstep 40 | train loss nan\nstep 60 | train loss nan\n"
    )
    assert not log.is_diverged  # a step may be skipped by a gradient scaler
    log.read(b"step 80 | train loss nan\n")
    assert log.is_diverged
    assert not read("loss nan\nloss nan\nloss 3.1\n").is_diverged
    assert read("step 1 loss 3.1\nstep 2 loss inf\n").is_diverged
    assert read("step 1 val loss nan\nstep 1 train loss 3.1\n").is_diverged


def test_memory_is_bounded() -> None:
    log = TrainingLog()
    line = b"step %d loss %.3f lr 0.001 " + b"x" * 1000 + b"\n"
    for step in range(0, 1000, 10):
        log.read(b"".join(line % (i, 3 + i / 1e6) for i in range(step, step + 10)))
        log.read(b"\xc3" * 2_000)
        log.read(b" noise_%d_loss 3.5\n" % step)
    for _ in range(20):
        log.read(b"a" * 2**20)
    log.read(b"\nval loss 3.25\n")
    assert len(pickle.dumps(log.__dict__ | {"_decoder": None})) < 2**21
    assert log.result().loss == 3.25
    named = TrainingLog("loss")
    named.read(b"".join(b"step %d loss 3.5\n" % step for step in range(5000)))
    curve = named.curve()
    assert 250 <= len(curve) <= 1000
    assert (curve[0][0] < 20, curve[-1][0]) == (True, 4999)
    assert len(curve) == len({step for step, _ in curve})
