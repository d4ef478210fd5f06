"""A node for tests: a list of texts, one per line."""


class TestPromptList:
    RETURN_TYPES = ("STRING",)
    OUTPUT_IS_LIST = (True,)
    FUNCTION = "split"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"texts": ("STRING", {"multiline": True})}}

    def split(self, texts):
        return (texts.splitlines(),)


NODE_CLASS_MAPPINGS = {"TestPromptList": TestPromptList}
