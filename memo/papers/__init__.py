"""Estimators of published papers, whole: equation 18, LLMem, DNNMem, and what the MEMO paper counts.

Commands answer with them where a user names one (`memo estimate --method eq18`, `memo plan --method llmem`); nothing
else of memo asks them.
"""
