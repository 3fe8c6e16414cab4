"""What is replaced on vLLM's objects, one module for each place. No class of vLLM is changed.

module         in vLLM                                          contract test in tests/vllm
prefix_cache   lookup and reset of the KV cache manager         test_contract.py
requests       prompt and block hashes of a request             test_contract_behaviour.py
events         `cache_full_blocks`, `take_events` of the pool   test_contract.py
reports        `process_outputs` of the output processor        test_contract_server.py
forced_tokens  logits processors of both model runners          test_contract.py
model_list     `show_available_models` of the server           test_contract.py
operators      fused kernels, during a recovery                 test_compiled.py
replacing      `forward` of attention, during a recovery        test_compiled.py
"""
