//! Stands in for the plugin of this name, which no package of Debian has: both call prost-build, and write its messages into
//! one file for each package. This one refuses options, and adds neither marks nor insertion points for further plugins.
use prost::Message;
use prost_build::{Config, Module};
use prost_types::compiler::{code_generator_response::File, CodeGeneratorRequest, CodeGeneratorResponse};
use std::io::{self, Read, Write};

const FEATURE_PROTO3_OPTIONAL: u64 = 1;

fn main() -> io::Result<()> {
    let mut input = Vec::new();
    io::stdin().read_to_end(&mut input)?;
    let request = CodeGeneratorRequest::decode(&*input)?;
    if !request.parameter().is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the stand-in for protoc-gen-prost has no options",
        ));
    }

    let mut wanted = Vec::new();
    let mut descriptors = Vec::new();
    for file in request.proto_file {
        let module = Module::from_protobuf_package_name(file.package());
        if request.file_to_generate.iter().any(|name| name == file.name()) {
            wanted.push(module.clone());
        }
        descriptors.push((module, file));
    }

    // The generator needs the imported files too, and writes modules of them.
    let mut modules = Config::new().generate(descriptors)?;
    modules.retain(|module, _| wanted.contains(module));
    let file = modules.into_iter().map(|(module, content)| File {
        name: Some(module.to_file_name_or("_")),
        content: Some(content),
        ..File::default()
    });
    let response = CodeGeneratorResponse {
        supported_features: Some(FEATURE_PROTO3_OPTIONAL),
        file: file.collect(),
        ..CodeGeneratorResponse::default()
    };
    io::stdout().write_all(&response.encode_to_vec())
}
