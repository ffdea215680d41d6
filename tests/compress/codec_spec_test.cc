#include "compress/codec_spec.h"

#include <gtest/gtest.h>

#include "compress/codec_list.h"

namespace thinwire {
namespace {

TEST(CodecSpec, PrintsWhatItParses) {
  for (const char* text : {"fp32", "bf16", "int8", "int4", "int4:block=128", "int8:block=4096"}) {
    const auto spec = CodecSpec::Parse(text);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->ToString(), text);
  }
  EXPECT_EQ(CodecSpec::Parse("int4:block=256")->ToString(), "int4");
}

TEST(CodecSpec, ErrorsNameTheNearest) {
  const std::pair<const char*, const char*> cases[] = {{"int5", "'int"},
                                                       {"in8", "'int8'"},
                                                       {"", "unknown codec ''"},
                                                       {"bf61", "'bf16'"},
                                                       {"int4:blok=256", "'block'"},
                                                       {"int4:block=250", "block=256"},
                                                       {"int4:block=0", "block=128"},
                                                       {"int4:block=99999", "block=4096"},
                                                       {"int4:block=x", "block=128"},
                                                       {"int4:", "'block'"},
                                                       {"fp32:block=256", "no parameters"},
                                                       {"int4:block=128,x=1", "'x'"}};
  for (const auto& [text, words] : cases) {
    const auto spec = CodecSpec::Parse(text);
    ASSERT_TRUE(absl::IsInvalidArgument(spec.status())) << text;
    EXPECT_NE(spec.status().message().find(words), absl::string_view::npos) << spec.status();
  }
}

TEST(CodecSpec, SizesAreThoseOfTheFormat) {
  const auto bytes = [](const char* text, size_t n) {
    return EncodedBytes(*CodecSpec::Parse(text), n);
  };
  EXPECT_EQ(bytes("int4", 0), 0u);
  EXPECT_EQ(bytes("int4", 1), 16u + 16u);
  EXPECT_EQ(bytes("int4", 256), 16u + 128u);
  EXPECT_EQ(bytes("int4", 257), 16u + 144u);
  EXPECT_EQ(bytes("int8", 2048), 16u + 2048u);
  EXPECT_EQ(bytes("int8", 2049), 32u + 2064u);
  EXPECT_EQ(bytes("int8:block=128", 2048), 32u + 2048u);
  EXPECT_EQ(bytes("bf16", 9), 32u);
  EXPECT_EQ(bytes("fp32", 4), 16u);
}

}  // namespace
}  // namespace thinwire
