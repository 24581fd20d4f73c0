"""Operations: what torch functions do on global tensors."""
