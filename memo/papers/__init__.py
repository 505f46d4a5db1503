"""Complete estimators of published papers: equation 18, LLMem, DNNMem, and the counts of the MEMO paper.

Commands use them only if a user names one (`memo estimate --method eq18`, `memo plan --method llmem`).
"""
