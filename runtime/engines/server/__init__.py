"""The client of OpenAI-compatible servers, for every engine whose model runs behind one."""
