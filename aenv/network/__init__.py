"""Network slots: one namespace, tap and policy per sandbox."""
